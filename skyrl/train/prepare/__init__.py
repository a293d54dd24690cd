"""Rows for RL from published data sets: `skyrl data prepare`. `published` knows the columns of each, `sources` finds
the files of a split, `preparing` makes the rows, `commands` has the command.
"""
