"""What every strategy needs, before its own idea begins.

file          what it gives
wrapper       the module around a module: attributes, names in checkpoints, changed parameters
groups        which ranks take part: torch's process_group and device_mesh
materialize   values for what is on the device meta
replay        what a forward pass depends on, to compute it a second time
replicas      every rank begins with the same model and rank 0's values
agree         arguments that must be alike, errors that all ranks must hear of
norm          the norm of gradients on several ranks, and clipping by it
no_sync       accumulation without averaging
tensors_in    the tensors in what a module gives, however deep
single        all_gather and reduce_scatter between a tensor and its shards
uncompiled    what torch.compile leaves as it stands
"""
