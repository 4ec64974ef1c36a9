"""What K, V and Q held: attention watched while batches run, added up, resumed, shared out."""
