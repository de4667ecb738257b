"""From text to batches: sources -> prepare (Ray Data) -> shards -> mixture (order) -> stream.

`mixture` alone decides the order, as a pure function; `shards` alone knows the files. The folder's
only use of Ray is in `prepare` and in the optional executor `ray_stream`.
"""
