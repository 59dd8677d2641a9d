"""What `check_plan` checks of each feature, in a file of the feature's name.

Nothing here knows the planner: it judges plans from anywhere.
"""
