"""Workers of the torch backend: `worker` executes commands, and `group` sends them to all ranks.

remote                     groups of workers in other processes
processes                  processes of this machine
ray_cluster, ray_actors    actors of a Ray cluster
"""
