"""Run in an interpreter of its own: reads eight objects, forks eight times, and the children read an object each, all at the same time."""

import os
import pickle
import sys

store = pickle.loads(bytes.fromhex(sys.argv[1]))
for number in range(8):
    assert bytes(store.get(f"object-{number}")) == bytes([number]) * 300_000

start, go = os.pipe()
children = []
for number in range(8):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(start, 1)  # returns when the parent closes its end
        right = all(bytes(store.get(f"object-{number}")) == bytes([number]) * 300_000 for _ in range(10))
        os._exit(0 if right else 1)
    children.append(pid)
os.close(go)
for pid in children:
    _, status = os.waitpid(pid, 0)
    print("right" if status == 0 else f"wrong: {status}")
