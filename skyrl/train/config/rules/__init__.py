"""Rules about fields of a trainer's configuration: invalid combinations, old names, and options without effect."""
