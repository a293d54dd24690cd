"""Data for training: reading files and data sets, chats, prompts, and a reproducible order of rows."""
