"""Puts bytes and a numpy array, and gets them back.

    python put_get.py               # needs the package `moontide` and numpy

The cluster of this program is in its own process and ends with it. With a running cluster, replace both `with` items by
``moontide.Store("host:7400") as store``.
"""

import numpy as np

import moontide


def main() -> None:
    with moontide.dev(64 << 20) as cluster, cluster.store() as store:
        # put returns whether it stored the object. It does not replace an existing one: two inference engines that
        # compute the same block produce the same bytes.
        assert store.put("greeting", b"high tide")
        assert not store.put("greeting", b"low tide")
        assert store.get("greeting") == b"high tide"
        assert store.put("greeting", b"low tide", overwrite=True)
        assert store.get("greeting") == b"low tide"

        # A missing key is not an error.
        assert store.get("never put") is None

        # An array is stored with its type and shape: layers, keys and values, tokens, heads, head dimension.
        block = np.random.default_rng(0).standard_normal((4, 2, 16, 2, 32)).astype(np.float16)
        store.put_tensor("block-0001", block)
        tensor = store.get_tensor("block-0001")
        assert tensor is not None
        assert (tensor.dtype, tuple(tensor.shape)) == ("float16", block.shape)
        np.testing.assert_array_equal(tensor.numpy(), block)

        # Many keys in one call; results have the order of the keys.
        store.batch_put(["p/0", "p/1"], [b"zero", b"one"])
        assert store.batch_get(["p/0", "p/1", "p/2"]) == [b"zero", b"one", None]

        assert store.remove("greeting")
        assert not store.exists("greeting")
    print("bytes, array and batch: ok")


if __name__ == "__main__":
    main()
