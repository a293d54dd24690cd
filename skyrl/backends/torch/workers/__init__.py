"""Workers of the torch backend: `worker` does commands, and `group` gives them to all ranks at once.

remote                     groups whose workers are other processes
processes                  on this machine
ray_cluster, ray_actors    on a cluster of Ray
"""
