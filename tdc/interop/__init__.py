"""Other things as containers and back: records, pytrees, structured arrays, Hugging Face datasets."""
