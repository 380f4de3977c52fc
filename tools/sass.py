"""Machine code of CUDA kernels as `cuobjdump -sass` prints it: instructions, and where each may go on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_ENDS = ("EXIT", "RET", "BRX", "JMX")  # nothing runs on behind them; BRX: by a table


@dataclass
class Instruction:
    address: int
    predicate: str  # "": it always runs
    name: str  # LDG.E.128
    operands: str

    @property
    def always_leaves(self) -> bool:
        """Whether what stands behind it is never next."""
        jumps = self.name == "BRA" and self.operands.strip().startswith(("0x", "`"))  # BRA P0, 0x10 tests P0
        return not self.predicate and (self.name.split(".")[0] in _ENDS or jumps)


@dataclass
class Kernel:
    name: str  # mangled
    arch: str  # sm_90a
    code: list[Instruction] = field(default_factory=list)

    def next_of(self) -> list[list[int]]:
        """By an instruction's index those that may come next. A call goes to both its target and, by its return, on.

        A jump by a table, whose entries are not read here, may go anywhere.
        """
        index = {instruction.address: i for i, instruction in enumerate(self.code)}
        out = []
        for i, each in enumerate(self.code):
            kind = each.name.split(".")[0]
            found = [] if each.always_leaves or i + 1 == len(self.code) else [i + 1]
            if kind in ("BRA", "CALL") and (target := re.search(r"\b0x([0-9a-f]+)\s*$", each.operands)):
                found += [index[address] for address in [int(target[1], 16)] if address in index]
            out.append(list(range(len(self.code))) if kind in ("BRX", "JMX") else found)
        return out

    def reached_before(self, barrier: str) -> list[Instruction]:
        """What some path from the entry reaches before it has met this instruction: what that does not dominate."""
        next_of, seen, open_ = self.next_of(), set[int](), [0]
        while open_:
            i = open_.pop()
            if i in seen or (self.code[i].name.startswith(barrier) and not self.code[i].predicate):
                continue
            seen.add(i)
            open_ += next_of[i]
        return [self.code[i] for i in sorted(seen)]

    def loops(self) -> list[list[Instruction]]:
        """The body of each loop: what lies on a way from its first instruction back to it (a natural loop)."""
        next_of = [found if len(found) <= 2 else [] for found in self.next_of()]  # no jumps by a table
        before: list[list[int]] = [[] for _ in self.code]
        for i, found in enumerate(next_of):
            for j in found:
                before[j].append(i)
        bodies: dict[int, set[int]] = {}
        for i, found in enumerate(next_of):
            for head in (j for j in found if j <= i and not self.code[i].name.startswith("CALL")):
                body, open_ = {head}, [i]
                while open_:
                    if (j := open_.pop()) not in body:
                        body.add(j)
                        open_ += before[j]
                if head == 0 or 0 not in body:  # else there is a way to its end around its head: a jump back, no loop
                    bodies.setdefault(head, set()).update(body)
        return [[self.code[i] for i in sorted(body)] for _, body in sorted(bodies.items())]

    def main_loop(self) -> list[Instruction]:
        """The loop that is densest in products of tensor cores, or where none has any, in bytes asked of
        device memory; all instructions of a kernel without such a loop.
        """
        loops = self.loops()
        best = max(loops, key=lambda body: num_mma(body) / len(body), default=[])
        if num_mma(best) == 0:
            best = max(loops, key=lambda body: asked_bytes(body) / len(body), default=[])
        return best if num_mma(best) or asked_bytes(best) else self.code


def num_mma(code: Iterable[Instruction]) -> int:
    """HMMA of a warp, HGMMA of a warpgroup."""
    return sum(each.name.startswith(("HMMA", "HGMMA")) for each in code)


def asked_bytes(code: Iterable[Instruction]) -> int:
    """Bytes of device memory that a thread asks for, by loads and by copies to shared memory. LD, of any memory, reads
    the shared memory of a cluster in these kernels.
    """
    total = 0
    for each in code:
        if each.name.split(".")[0] in ("LDG", "LDGSTS"):
            width = re.search(r"\.[US]?(8|16|64|128)\b", each.name)  # .LTC128B, a hint for L2, is none
            total += int(width[1]) // 8 if width else 4
    return total


def read_kernels(lines: Iterable[str]) -> Iterator[Kernel]:
    """Each kernel of each architecture."""
    arch, kernel = "", None
    for line in lines:
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\w+)", line):
            if kernel:
                yield kernel
            kernel = Kernel(match[1], arch)
        elif kernel and (match := _LINE.match(line)):
            kernel.code.append(Instruction(int(match[1], 16), (match[2] or "").strip(), match[3], match[4].strip()))
    if kernel:
        yield kernel
