"""Rules for the configurations of the trainers: invalid combinations, old names, and options without effect."""
