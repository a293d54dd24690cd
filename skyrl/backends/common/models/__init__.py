"""Models of any backend on the host: what they are (`kind`), which operations there are (`operations`), their files
(`store`, `checkpoint_folder`, `training_files`).
"""
