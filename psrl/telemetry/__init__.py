"""What a run leaves behind and shows: metrics, trajectories, errors, time, the live table and the report."""
