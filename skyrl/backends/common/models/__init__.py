"""Models of any backend, seen from the host: their kinds (`kind`), operations (`operations`) and files (`store`,
`checkpoint_folder`, `training_files`).
"""
