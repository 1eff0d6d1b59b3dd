"""Better distillation losses for PRIME-RL, as drop-in adapters; the same TOML recipe runs on one machine and on a cluster."""
