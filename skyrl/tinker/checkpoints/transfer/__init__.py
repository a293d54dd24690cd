"""Transfer of checkpoint files to clients (`tar_stream`, `age_encryption`) and from clients (`uploads`)."""
