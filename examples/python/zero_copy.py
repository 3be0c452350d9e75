"""Reads objects in the memory of a node on the same host, without a copy.

    python zero_copy.py             # needs the package `moontide` and numpy

The cluster of this program is in its own process and ends with it. With a running cluster, replace both `with` items by
``moontide.Store("host:7400") as store``. If no node of the host has an object, views are copies, and ``zero_copy`` is
False.
"""

import numpy as np

import moontide


def main() -> None:
    with moontide.dev(64 << 20) as cluster, cluster.store() as store:
        numbers = np.arange(300_000, dtype=np.float32)
        store.put("numbers", numbers)

        view = store.get_view("numbers")
        assert view is not None and view.zero_copy
        array = np.frombuffer(memoryview(view), dtype=np.float32)  # the memory of the node itself
        np.testing.assert_array_equal(array, numbers)
        assert not array.flags.writeable
        # Zero-copy bytes are compared with their digest only on request; copies always are.
        assert view.verify()

        # The bytes do not change while the view or an array made from it exists, even if the object is removed.
        store.remove("numbers", force=True)
        assert store.get("numbers") is None
        np.testing.assert_array_equal(array, numbers)

        # The node cannot reuse the memory before the view is released. It refuses while an array uses the memory.
        try:
            view.release()
        except BufferError:
            del array
            view.release()
        else:
            raise AssertionError("the array still used the view")

        # Tensors are zero-copy too.
        store.put_tensor("block", numbers.reshape(3, -1))
        tensor = store.get_tensor("block")
        assert tensor is not None and tensor.zero_copy and tensor.numpy().shape == (3, 100_000)
    print("read in place: ok")


if __name__ == "__main__":
    main()
