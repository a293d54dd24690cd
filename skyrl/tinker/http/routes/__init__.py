"""Routes of the API, one file per group of endpoints. `dependencies` has their parameters."""
