"""`skyrl data prepare`: conversion of published data sets to rows for RL.

`published` describes the columns of each data set, `sources` finds the files of a split, `preparing` converts the rows,
and `commands` implements the command.
"""
