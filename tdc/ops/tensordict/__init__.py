"""Operations on TensorDicts: leaf by leaf, along batch dims, and on their memory."""
