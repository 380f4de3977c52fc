// Makes zod_schemas.json: npm install zod@4, node zod_schemas.mjs. Schemas as zod writes them, in both drafts.
import { z } from "zod";
const all = {
  record: z.object({ m: z.record(z.string(), z.number()) }),
  record_of_enum: z.record(z.enum(["a", "b"]), z.number()),
  partial_record: z.partialRecord(z.enum(["a", "b"]), z.boolean()),
  tuple: z.tuple([z.string(), z.number()]),
  tuple_with_rest: z.tuple([z.string()], z.boolean()),
  set_like: z.array(z.enum(["x", "y"])).min(1).max(3),
  discriminated: z.discriminatedUnion("kind", [z.object({ kind: z.literal("a"), x: z.number().int() }), z.object({ kind: z.literal("b"), y: z.string() })]),
  union: z.union([z.string(), z.number(), z.null()]),
  optional: z.object({ a: z.string().optional(), b: z.number().nullable(), c: z.boolean().default(true) }),
  strict: z.strictObject({ a: z.string() }),
  loose: z.looseObject({ a: z.string() }),
  catchall: z.object({ a: z.string() }).catchall(z.number()),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  extended: z.object({ a: z.string() }).extend({ b: z.array(z.int32()) }),
  numbers: z.object({ i: z.int(), p: z.number().positive(), m: z.number().multipleOf(0.5), r: z.number().gt(0).lte(0.5), f: z.float32() }),
  strings: z.object({ email: z.email(), url: z.url(), uuid: z.uuid(), date: z.iso.date(), time: z.iso.time(), datetime: z.iso.datetime(), ipv4: z.ipv4(), b64: z.base64(), d: z.iso.duration(), re: z.string().regex(/^[a-z]{2,5}\d+$/), len: z.string().min(2).max(4), starts: z.string().startsWith("ab") }),
  literal: z.literal(["a", 1, null]),
  nested: z.object({ list: z.array(z.object({ id: z.number().int().min(1).max(9), tags: z.array(z.string()).optional() })) }),
};
const Node = z.object({ v: z.int(), get next() { return Node.nullable(); } });
all.recursive = Node;
const out = {};
for (const [name, schema] of Object.entries(all)) for (const [target, key] of [["draft-2020-12", ""], ["draft-7", "_draft7"]])
  out[name + key] = z.toJSONSchema(schema, { target });
console.log(JSON.stringify(out, null, 1));
