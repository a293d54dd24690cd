"""`skyrl data prepare`: conversion of published data sets to rows for RL. `skyrl data check`: printing of rows.

`published` defines how the rows of each data set are read, `sources` finds the files of a split, `preparing` converts
the rows, and `commands` implements the command. `check` prints rows as a run reads them.
"""
