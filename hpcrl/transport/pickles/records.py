"""The list: every class of torch, Megatron-core, vLLM and FlashInfer that a message of another process, or a
checkpoint's `.metadata`, may hold, by exact module and name, each with who writes it.

They were seen in saves and loads of Megatron-core 0.16.1 (Python 3.11) and 0.19.2 (Python 3.12) with torch 2.13, of one
to four ranks in all layouts, and in engines of vLLM 0.32 with two workers.
"""

from __future__ import annotations

CHECKPOINT = "torch.distributed.checkpoint."
METADATA = CHECKPOINT + "metadata"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
KV_CACHE = "vllm.v1.kv_cache_interface"
SCHEDULED = "vllm.v1.core.sched.output"
OUTPUTS = "vllm.v1.outputs"
#: made empty, without `__init__`; then they take their attributes
RECORDS = {
    # .metadata; plans of a load hold MetadataIndex too
    (METADATA, "BytesStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "TensorProperties"),
    (METADATA, "TensorStorageMetadata"),
    (SHARDED, "TensorProperties"),  # .metadata of torch before 2.3
    # .metadata, and what ranks tell one another after a save (Megatron's state_dict_saver.py)
    (CHECKPOINT + "filesystem", "_StorageInfo"),
    (CHECKPOINT + "storage", "WriteResult"),
    # who writes and reads what (state_dict_saver.py; torch's own load)
    (CHECKPOINT + "planner", "BytesIOWriteData"),
    (CHECKPOINT + "planner", "LoadPlan"),
    (CHECKPOINT + "planner", "ReadItem"),
    (CHECKPOINT + "planner", "SavePlan"),
    (CHECKPOINT + "planner", "TensorWriteData"),
    (CHECKPOINT + "planner", "WriteItem"),
    # which rank has which shard (Megatron's validation.py and exchange_utils.py)
    ("megatron.core.dist_checkpointing.mapping", "ShardedObject"),
    ("megatron.core.dist_checkpointing.mapping", "ShardedTensor"),
    # the settings in the common part of a checkpoint, which ranks compare before a save (validation.py)
    ("argparse", "Namespace"),
}
#: the same, between the processes of an engine
ENGINE_RECORDS = {
    # where workers find their queue (shm_broadcast.py)
    ("vllm.distributed.device_communicators.shm_broadcast", "Handle"),
    # a step, from the scheduler to the workers
    (SCHEDULED, "CachedRequestData"),
    (SCHEDULED, "GrammarOutput"),
    (SCHEDULED, "NewRequestData"),
    (SCHEDULED, "SchedulerOutput"),
    ("vllm.sampling_params", "RepetitionDetectionParams"),
    ("vllm.sampling_params", "StructuredOutputsParams"),
    # its result
    (OUTPUTS, "DraftTokenIds"),
    (OUTPUTS, "ModelRunnerOutput"),
    # how the KV cache is laid out
    (KV_CACHE, "ChunkedLocalAttentionSpec"),
    (KV_CACHE, "FullAttentionSpec"),
    (KV_CACHE, "KVCacheConfig"),
    (KV_CACHE, "KVCacheGroupSpec"),
    (KV_CACHE, "KVCacheTensor"),
    (KV_CACHE, "MLAAttentionSpec"),
    (KV_CACHE, "MambaSpec"),
    (KV_CACHE, "SlidingWindowSpec"),
    (KV_CACHE, "UniformTypeKVCacheSpecs"),
}
#: named tuples, and msgspec's structs, whose own checks run; made from their parts
ENGINE_TUPLES = {
    ("vllm.distributed.parallel_state", "TensorMetadata"),
    (OUTPUTS, "LogprobsLists"),
    (OUTPUTS, "LogprobsTensors"),
    (OUTPUTS, "SamplingMaskLists"),
    ("vllm.lora.request", "LoRARequest"),
    ("vllm.sampling_params", "SamplingParams"),
    ("vllm.v1.worker.worker_base", "CompilationTimes"),
}
#: enumerations in the records above
ENUMS = {
    (METADATA, "_MEM_FORMAT_ENCODING"),
    (SHARDED, "MEM_FORMAT_ENCODING"),
    (CHECKPOINT + "planner", "LoadItemType"),
    (CHECKPOINT + "planner", "WriteItemType"),
}
ENGINE_ENUMS = {
    (KV_CACHE, "KVCacheGroupRole"),
    (KV_CACHE, "KVCacheSpecKind"),
    (KV_CACHE, "KVQuantMode"),
    (KV_CACHE, "SparseCacheRole"),
    ("vllm.sampling_params", "RequestOutputKind"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc.ResponseStatus"),
}
#: address of a GPU's memory for other processes; workers send it where they make FlashInfer's fused all-reduce
IPC_HANDLE = ("flashinfer.comm.cuda_ipc", "cudaIpcMemHandle_t")
#: torch's kinds of numbers: of shards, and of tensors that are sent
DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "complex64", "complex128"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
}
