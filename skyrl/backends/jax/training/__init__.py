"""Training on JAX: `microbatches` packs passes into tiles, `programs` computes them, `program_choice` selects them."""
