"""Entry points under the module names of SkyRL's scripts. Each runs a `skyrl train` command."""
