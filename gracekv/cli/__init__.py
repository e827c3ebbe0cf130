"""The `gracekv` console command, one module per group of subcommands."""
