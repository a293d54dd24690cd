"""Entry points that have the module names of SkyRL's scripts. Each runs a `skyrl train` command."""
