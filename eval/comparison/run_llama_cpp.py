"""llama.cpp's process: quantizes a GGUF file with its own quantizer; runs in its environment.

python run_llama_cpp.py SOURCE.gguf OUT.gguf THREADS

Q4_0 for every linear, without an importance matrix; the embedding, which is the head too, stays
in bfloat16.
"""

import ctypes
import sys

import llama_cpp

BF16 = 30  # of ggml_type in ggml.h; the bindings do not name it


def main(source: str, out: str, threads: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.token_embedding_type = params.output_tensor_type = BF16
    params.nthread = int(threads)
    llama_cpp.llama_backend_init()
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
