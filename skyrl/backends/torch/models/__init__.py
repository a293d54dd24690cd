"""Models of the torch backend: their handles (`state`) and their files (`checkpoints`)."""
