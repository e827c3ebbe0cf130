"""Models whose attention heads are spread over processes (tensor parallelism).

Every process calls `gracekv.compress` with the same arguments, holds its own KV heads, and keeps of
them what one process holding all heads would keep.
"""

from gracekv.distributed.sharding import HeadShard, connect, head_shard, is_sharded

__all__ = ["HeadShard", "connect", "head_shard", "is_sharded"]
