//! How sizes, times and keys are read from the command line and shown on a terminal.
//!
//! Keys are bytes. What is printable stands as it is; `%`, control characters and bytes that are not UTF-8 are
//! percent-escaped, so that no key can steer a terminal and every line can be turned back into its key.

use std::fmt::Write;
use std::time::Duration;

/// Reads `131072`, `64K`, `512MiB`, `4GiB` or `1T`. Units are powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size; write 131072, 64KiB, 512MiB or 4GiB");
    let trimmed = text.trim();
    let digits = trimmed.len() - trimmed.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = trimmed.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(wrong()),
    };
    let number = number.parse::<u64>().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// Reads `250ms`, `30s`, `5m`, `2h` or `1d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time; write 250ms, 30s, 5m or 2h");
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit_ms: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    let number = number.parse::<u64>().map_err(|_| wrong())?;
    number.checked_mul(unit_ms).map(Duration::from_millis).ok_or_else(wrong)
}

/// A number of bytes for people: `1.5 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = (count.max(1).ilog2() / 10) as usize;
    match step {
        0 => format!("{count} B"),
        _ => format!("{:.1} {}", count as f64 / 1024f64.powi(step as i32), units[step]),
    }
}

/// A key as it is shown.
pub(crate) fn escaped(key: &[u8]) -> String {
    let mut shown = String::with_capacity(key.len());
    let escape = |shown: &mut String, bytes: &[u8]| {
        for byte in bytes {
            let _ = write!(shown, "%{byte:02X}");
        }
    };
    for chunk in key.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c == '%' || c.is_control() {
                escape(&mut shown, c.encode_utf8(&mut [0; 4]).as_bytes());
            } else {
                shown.push(c);
            }
        }
        escape(&mut shown, chunk.invalid());
    }
    shown
}

/// The key behind what [`escaped`] shows.
pub(crate) fn unescaped(shown: &[u8]) -> Result<Vec<u8>, String> {
    let mut key = Vec::with_capacity(shown.len());
    let mut rest = shown;
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            key.push(*first);
            continue;
        }
        let byte = tail
            .get(..2)
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            .ok_or(
                "a % in an escaped key is followed by two hexadecimal digits; write %25 for the sign itself",
            )?;
        key.push(byte);
        rest = &tail[2..];
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("131072", 131_072),
            ("64K", 65_536),
            ("4GiB", 4 << 30),
            ("1 MiB", 1 << 20),
            ("2t", 2 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "K", "-1", "1.5G", "4GB", "99999999999T", "1KiBx"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, ms) in
            [("250ms", 250), ("30s", 30_000), ("5m", 300_000), ("2h", 7_200_000), ("1d", 86_400_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for wrong in ["", "5", "s", "-1s", "1.5s", "99999999999999999999s", "999999999999999999d"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bytes_are_shown_for_people() {
        for (count, shown) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 20, "1.5 GiB"), (u64::MAX, "16.0 EiB")]
        {
            assert_eq!(bytes(count), shown);
        }
    }

    #[test]
    fn keys_cannot_steer_a_terminal() {
        assert_eq!(escaped(b"model/7b/\xffblock\x1b[2J 100%"), "model/7b/%FFblock%1B[2J 100%25");
        assert_eq!(escaped("größe".as_bytes()), "größe");
        assert!(unescaped(b"%").is_err());
        assert!(unescaped(b"%+1").is_err());
    }

    proptest! {
        #[test]
        fn every_key_comes_back_from_how_it_is_shown(key: Vec<u8>) {
            prop_assert_eq!(unescaped(escaped(&key).as_bytes()), Ok(key));
        }
    }
}
