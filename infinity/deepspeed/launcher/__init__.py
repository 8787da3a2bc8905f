"""Translation of DeepSpeed's launcher to torchrun: flags, hosts, commands. `infinity run` executes the result."""
