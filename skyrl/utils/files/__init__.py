"""Files and folders: atomic writes, archives, and file formats of models.

atomic_folders             atomic folders and files
tar_folder                 a folder as one file
object_store               objects in a bucket, by URL
remote_folders             atomic folders in a bucket
tensor_file, hf_files      safetensors, and other files of Hugging Face models
weight_files               files of a model's weights
paths                      default folders of this user
"""
