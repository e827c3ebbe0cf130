"""The `gracekv` console command, one module for each group of subcommands."""
