//! Opens a trace file: plain, or compressed with gzip or zstd. The first bytes of the file tell which.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::reader::{Reader, TraceError};
use crate::results::{BenchError, io};

const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Bytes per read, of the file and of the decompressed trace.
const BUFFER_BYTES: usize = 1 << 20;

/// Opens a trace and reads its first line.
pub(crate) fn open(path: &Path) -> Result<Reader<Box<dyn BufRead>>, BenchError> {
    let mut file = BufReader::with_capacity(BUFFER_BYTES, File::open(path).map_err(io("opening the trace"))?);
    let start = file.fill_buf().map_err(io("reading the trace"))?;
    let input: Box<dyn BufRead> = if start.starts_with(GZIP_MAGIC) {
        Box::new(BufReader::with_capacity(BUFFER_BYTES, flate2::bufread::MultiGzDecoder::new(file)))
    } else if start.starts_with(ZSTD_MAGIC) {
        let decoder = ruzstd::decoding::StreamingDecoder::new(file).map_err(|error| {
            BenchError::Wrong(format!(
                "{}: {error}; decompress it with `zstd -d --long=31` first",
                path.display()
            ))
        })?;
        Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
    } else {
        Box::new(file)
    };
    Reader::new(input).map_err(unread(path))
}

/// Returns a closure for `map_err` that adds the path.
pub(crate) fn unread(path: &Path) -> impl Fn(TraceError) -> BenchError {
    move |error| BenchError::Wrong(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::trace::Request;

    const TRACE: &str = "{\"timestamp\":0,\"input_length\":700,\"output_length\":1,\"hash_ids\":[7,8]}\n\
                         {\"timestamp\":5,\"input_length\":700,\"output_length\":1,\"hash_ids\":[7,9]}\n";

    fn read(name: &str, bytes: &[u8]) -> Result<Vec<Request>, BenchError> {
        let path = std::env::temp_dir().join(format!("moontide-trace-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let requests = open(&path).and_then(|reader| reader.collect::<Result<_, _>>().map_err(unread(&path)));
        std::fs::remove_file(&path).unwrap();
        requests
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &str) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
    }

    #[test]
    fn compressed_traces_are_read_like_plain_ones() {
        let plain = read("plain", TRACE.as_bytes()).unwrap();
        assert_eq!(plain.len(), 2);
        assert_eq!(read("gzip", &gzip(TRACE)).unwrap(), plain);
        assert_eq!(read("zstd", &zstd(TRACE)).unwrap(), plain);
    }

    #[test]
    fn truncated_compressed_trace_is_an_error_with_its_path() {
        for (name, bytes) in [("cut.gz", gzip(TRACE)), ("cut.zst", zstd(TRACE))] {
            let error = read(name, &bytes[..bytes.len() - 6]).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
