"""Data for training: rows of files and data sets, chats, prompts, and a reproducible order of rows."""
