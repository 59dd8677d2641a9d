"""Rollouts from files to batches, without torch.

files, rollouts    JSON Lines and Parquet -> checked records
index, dataset     any record at once; order, shuffling, resuming
lengths            lengths alone, for the planner's commands
generated          toy rollouts
batches            config -> samples -> batches -> plans
"""
