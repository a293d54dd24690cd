"""Rules between fields of a trainer's configuration: what is refused, renamed, or has no effect."""
