"""Ways to say the same facts over HTTP: each makes `Item`s of a body, and an answer of what became of them."""
