"""Machine code of CUDA kernels as `cuobjdump -sass` prints it: instructions, and where each may go on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*);")
_REGISTER = re.compile(r"\bR(\d+)\b")
WGMMA = ("HGMMA", "QGMMA")  # of numbers of 16 bits, of 8
_NO_RESULT = re.compile(r"\w*SETP2?\b|PLOP3|R2P|B(AR|RA|RX|SYNC|REAK|SSY)\b|CALL|RET|JMX|WARPSYNC|NANOSLEEP|CCTL")
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

    @property
    def written(self) -> range:
        """The registers of the result, which are neighbours: of wgmma the accumulators, which are written later."""
        if _NO_RESULT.match(self.name):
            return range(0)
        operands = [operand.strip() for operand in self.operands.split(",")]
        while len(operands) > 1 and re.fullmatch(r"!?U?P(T|\d+)", operands[0]):  # SHFL PT, R2, ..: also a predicate
            del operands[0]
        match = re.fullmatch(r"R(\d+)", operands[0])
        if not match:
            return range(0)
        kind = self.name.split(".")[0]
        if kind in WGMMA and (shape := re.search(r"\.64x(\d+)x\d+\.(F\d+)", self.name)):
            count = int(shape[1]) // (2 if shape[2] == "F32" else 4)
        elif kind in ("HMMA", "IMMA", "QMMA") or re.search(r"\.128\b|^LDSM\..*\.4$", self.name):
            count = 4
        else:
            count = 2 if re.search(r"\.64\b|\.WIDE\b|^LDSM\..*\.2$|^D(ADD|MUL|FMA)\b", self.name) else 1
        return range(int(match[1]), int(match[1]) + count)

    @property
    def named(self) -> set[int]:
        """The registers that its text names: of several neighbours the first."""
        return {int(number) for number in _REGISTER.findall(self.operands)}


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

    def wgmma_faults(self) -> list[str]:
        """Breaches of the rules of asynchronous products (PTX ISA, "wgmma.fence" and "wgmma.wait_group"), on any path.

        From a product on, until a wait that covers its group, nothing else may write its A or name its accumulators.
        Back to a WARPGROUP.ARRIVE, nothing else may have written either.
        """
        next_of = self._between_blocks()
        before: list[list[int]] = [[] for _ in self.code]
        for i, found in enumerate(next_of):
            for j in found:
                before[j].append(i)
        faults = set()
        for start, each in enumerate(self.code):
            if not each.name.startswith(WGMMA):
                continue
            sums = set(each.written)
            a = re.match(r"\s*R(\d+)\s*$", each.operands.split(",")[1])  # else A lies in shared memory
            rows = set(range(int(a[1]), int(a[1]) + 4)) if a else set()
            faults |= {
                f"{fault} {each.name} at {each.address:#x}" for fault in self._unfenced(start, before, sums | rows)
            }
            faults |= {f"{fault} {each.name} at {each.address:#x}" for fault in self._early(start, next_of, sums, rows)}
        return sorted(faults)

    def _between_blocks(self) -> list[list[int]]:
        """As `next_of`, but a jump by a table goes to begins of blocks: instructions behind a branch, and targets of
        branches. If it could go to any instruction, a way would lead between a fence and its product.
        """
        next_of = self.next_of()
        tables = [len(found) == len(self.code) for found in next_of]
        begins = set()
        for i, found in enumerate(next_of):
            if not tables[i]:
                begins |= set(found) - {i + 1}
            if self.code[i].name.split(".")[0] in ("BRA", "CALL", *_ENDS):
                begins |= {i + 1} & set(range(len(self.code)))
        return [sorted(begins) if is_table else found for is_table, found in zip(tables, next_of, strict=True)]

    def _unfenced(self, start: int, before: list[list[int]], registers: set[int]) -> Iterator[str]:
        seen, open_ = set[int](), list(before[start])
        if start == 0:
            yield "no fence before"
        while open_:
            i = open_.pop()
            each = self.code[i]
            if i in seen or (each.name.startswith("WARPGROUP.ARRIVE") and not each.predicate):
                continue
            seen.add(i)
            if not each.name.startswith(WGMMA) and registers & set(each.written):
                yield f"{each.name} at {each.address:#x} writes behind the fence of"
            if i == 0:
                yield "no fence before"
            open_ += before[i]

    def _early(self, start: int, next_of: list[list[int]], sums: set[int], rows: set[int]) -> Iterator[str]:
        """Walk on with the number of groups that have ended since that of `start` did; -1: that has not."""
        most = 8  # more groups than any wait leaves under way
        ends = "gsb" in self.code[start].operands
        seen, open_ = set[tuple[int, int]](), [(i, 0 if ends else -1) for i in next_of[start]]
        while open_:
            i, since = open_.pop()
            if (i, since) in seen:
                continue
            seen.add((i, since))
            each = self.code[i]
            if each.name.startswith("WARPGROUP.DEPBAR") and not each.predicate:
                left = re.search(r"\b0x([0-9a-f]+)\s*$", each.operands)
                if since >= (int(left[1], 16) if left else 0):
                    continue
            elif each.name.startswith(WGMMA):
                if rows & set(each.written):
                    yield f"{each.name} at {each.address:#x} writes A, before the wait for"
                since = min(since + ("gsb" in each.operands), most)
            elif rows & set(each.written) or sums & (set(each.written) | each.named):
                yield f"{each.name} at {each.address:#x} does not wait for"
            open_ += [(j, since) for j in next_of[i]]

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
    """Counts the products of a warp and those of a warpgroup."""
    return sum(each.name.startswith(("HMMA", "QMMA", *WGMMA)) for each in code)


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
