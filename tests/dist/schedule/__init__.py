"""Megatron's schedules and lists of operations, hosts' own steps, what runs ahead."""
