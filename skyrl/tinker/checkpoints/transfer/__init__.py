"""Files of checkpoints on their way to clients (`tar_stream`, `age_encryption`), and from them (`uploads`)."""
