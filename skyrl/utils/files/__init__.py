"""Files and folders: written wholly or not at all, packed as one, and in the formats of models.

atomic_folders             folders and files that are there wholly or not at all
tar_folder                 a folder as one file
object_store               objects in a bucket, by URL
remote_folders             folders in a bucket that are there wholly or not at all
tensor_file, hf_files      safetensors, and what Hugging Face has beside it
paths                      where this user's files are
"""
