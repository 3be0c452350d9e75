//! Sizes and durations on the command line: parsers of arguments, and the format of sizes in output.

/// Formats a number of bytes with a binary unit: `1.5 GiB`.
pub fn format_bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = (count.max(1).ilog2() / 10) as usize;
    match step {
        0 => format!("{count} B"),
        _ => format!("{:.1} {}", count as f64 / 1024f64.powi(step as i32), units[step]),
    }
}

/// Parses the size of a transfer or a record: `4096`, `64K` or `16M`.
pub(crate) fn transfer_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    match bytes {
        Some(bytes @ 0x1000..=0x400_0000) => Ok(bytes),
        _ => Err("not a size from 4K to 64M; use e.g. 4096, 64K or 16M".into()),
    }
}

/// Parses the duration of a measurement in seconds.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.001..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("not a number of seconds from 0.001 to 60".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_are_formatted_with_units() {
        for (count, shown) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 20, "1.5 GiB"), (u64::MAX, "16.0 EiB")]
        {
            assert_eq!(format_bytes(count), shown);
        }
    }

    #[test]
    fn transfer_bytes_parses_suffixes_and_rejects_out_of_range() {
        assert_eq!(transfer_bytes("4096"), Ok(4096));
        assert_eq!(transfer_bytes("64K"), Ok(65536));
        assert_eq!(transfer_bytes("16m"), Ok(16 << 20));
        for wrong in ["", "0", "K", "4095", "-1", "65M", "1G", "99999999999999999999K"] {
            assert!(transfer_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
