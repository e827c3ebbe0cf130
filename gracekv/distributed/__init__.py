"""Models whose attention heads are sharded over processes (tensor parallelism).

Every process calls `gracekv.compress` with the same arguments, holds its own KV heads, and keeps
the same entries of them as a single process with all heads would.
"""

from gracekv.distributed.sharding import HeadShard as HeadShard
from gracekv.distributed.sharding import connect as connect
from gracekv.distributed.sharding import head_shard as head_shard
from gracekv.distributed.sharding import is_sharded as is_sharded
