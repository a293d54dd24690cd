"""One file to a group of endpoints; `dependencies` is what they are given."""
