"""Run in an interpreter of its own: reads one object, forks eight times, and each child reads an object of its own."""

import os
import pickle
import sys

store = pickle.loads(bytes.fromhex(sys.argv[1]))
for number in range(8):
    assert bytes(store.get(f"object-{number}")) == bytes([number]) * 300_000

children = []
for number in range(8):
    pid = os.fork()
    if pid == 0:
        right = all(bytes(store.get(f"object-{number}")) == bytes([number]) * 300_000 for _ in range(10))
        os._exit(0 if right else 1)
    children.append(pid)
for pid in children:
    _, status = os.waitpid(pid, 0)
    print("right" if status == 0 else f"wrong: {status}")
