"""Code written for one example, control flow and all, run on a batch: source to control tree, blocks under vmap."""
