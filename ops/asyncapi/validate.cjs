// Reads an AsyncAPI document on standard input; writes what AsyncAPI's own parser has against it as JSON on standard output.
// Its folder is that of package.json's packages: `node validate.cjs < asyncapi.json`.
const { Parser } = require("@asyncapi/parser");
const { AvroSchemaParser } = require("@asyncapi/avro-schema-parser");

const SEVERITIES = ["error", "warning", "information", "hint"];

async function main() {
  const chunks = [];
  for await (const chunk of process.stdin) chunks.push(chunk);
  const parser = new Parser();
  const avro = AvroSchemaParser();
  parser.registerSchemaParser(avro);
  const text = Buffer.concat(chunks).toString("utf8");
  const { document, diagnostics } = await parser.parse(text);
  // The parser reads the payloads of a 3.x document without validating them (3.6.3 has that rule for 2.x only).
  const messages = document ? Object.entries(JSON.parse(text).components.messages) : [];
  for (const [name, message] of messages) {
    const path = ["components", "messages", name, "payload", "schema"];
    for (const { message: why } of await avro.validate({ data: message.payload.schema, path })) {
      diagnostics.push({ severity: 0, code: "avro-schema", message: why, path });
    }
  }
  const found = diagnostics.map((one) => ({
    severity: SEVERITIES[one.severity],
    code: String(one.code),
    message: one.message,
    path: one.path.join("/"),
  }));
  const valid = document && found.every((one) => one.severity !== "error");
  const read = valid && {
    version: document.version(),
    channels: document.channels().all().map((channel) => channel.id()),
    operations: document.operations().all().map((operation) => operation.id()),
    messages: document.messages().all().map((message) => message.name()),
  };
  process.stdout.write(JSON.stringify({ diagnostics: found, read: read || null }));
}

main().catch((error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exitCode = 1;
});
