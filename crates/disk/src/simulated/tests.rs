//! Durability, faults and counters of a simulated disk.

use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
use crate::storage::{Op, OpKind, run_all, run_one, sync};

const SEEDS: u64 = 1000;

fn filled(blocks: usize, byte: u8) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed(blocks * BLOCK_BYTES);
    bytes.fill(byte);
    bytes
}

fn write(disk: &SimulatedDisk, file: &File, offset: u64, bytes: AlignedBuf) -> io::Result<()> {
    let op = Op { tag: 0, kind: OpKind::Write, file: file.clone(), offset, buffer: Buffer::Owned(bytes) };
    run_one(&mut *disk.queue(&QueueConfig::default()), op).result
}

fn read(disk: &SimulatedDisk, file: &File, offset: u64, blocks: usize) -> io::Result<Vec<u8>> {
    let buffer = Buffer::Owned(AlignedBuf::zeroed(blocks * BLOCK_BYTES));
    let op = Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer };
    let done = run_one(&mut *disk.queue(&QueueConfig::default()), op);
    done.result.map(|()| done.buffer.as_slice().to_vec())
}

fn sync_file(disk: &SimulatedDisk, file: &File) -> io::Result<()> {
    sync(&mut *disk.queue(&QueueConfig::default()), file)
}

/// Creates a file whose name is durable.
fn create(disk: &SimulatedDisk, path: &str) -> File {
    let file = disk.open(Path::new(path), OpenMode::Create).unwrap();
    disk.sync_dir(Path::new("")).unwrap();
    file
}

fn names(disk: &SimulatedDisk) -> Vec<String> {
    disk.files().into_iter().map(|(name, _)| name).collect()
}

#[test]
fn crash_keeps_synced_writes_and_tears_others_by_sector() {
    let (mut old, mut new, mut torn) = (0, 0, 0);
    for seed in 0..SEEDS {
        let disk = SimulatedDisk::new(seed);
        let file = create(&disk, "a");
        write(&disk, &file, 0, filled(2, 1)).unwrap();
        sync_file(&disk, &file).unwrap();
        write(&disk, &file, 4096, filled(1, 2)).unwrap();
        disk.restart();
        let bytes = disk.read_file("a");
        assert_eq!(bytes.len(), 8192, "seed {seed}");
        assert!(bytes[..4096].iter().all(|byte| *byte == 1), "seed {seed}: a synced byte is lost");
        let kept: Vec<bool> = bytes[4096..]
            .chunks(SECTOR_BYTES)
            .map(|sector| {
                assert!(sector.iter().all(|byte| *byte == sector[0]), "seed {seed}: a sector is torn");
                sector[0] == 2
            })
            .collect();
        match kept.iter().filter(|kept| **kept).count() {
            0 => old += 1,
            8 => new += 1,
            _ => torn += 1,
        }
    }
    assert!(old > 0 && new > 0 && torn > 900, "{old} old, {new} new, {torn} torn");
}

#[test]
fn synced_file_length_survives_crash() {
    let mut lengths = BTreeSet::new();
    for seed in 0..SEEDS {
        let disk = SimulatedDisk::new(seed);
        let file = create(&disk, "a");
        disk.allocate(&file, 8192).unwrap();
        sync_file(&disk, &file).unwrap();
        disk.allocate(&file, 4096).unwrap();
        write(&disk, &file, 8192, filled(1, 7)).unwrap();
        disk.restart();
        lengths.insert(disk.read_file("a").len());
    }
    assert_eq!(lengths, BTreeSet::from([8192, 12288]));
}

#[test]
fn truncated_bytes_read_as_zero_after_file_grows() {
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        let file = create(&disk, "a");
        write(&disk, &file, 0, filled(4, 9)).unwrap();
        sync_file(&disk, &file).unwrap();
        disk.allocate(&file, 5000).unwrap();
        disk.allocate(&file, 16384).unwrap();
        let expected = [vec![9; 5000], vec![0; 11384]].concat();
        assert_eq!(disk.read_file("a"), expected);
        sync_file(&disk, &file).unwrap();
        disk.restart();
        assert_eq!(disk.read_file("a"), expected, "seed {seed}");
    }
}

#[test]
fn later_sync_does_not_recover_writes_lost_by_failed_sync() {
    let faults = Faults { sync_error_permille: 1000, ..Faults::default() };
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..SEEDS {
        let disk = SimulatedDisk::new(seed);
        let file = create(&disk, "a");
        disk.allocate(&file, 4096).unwrap();
        sync_file(&disk, &file).unwrap();
        write(&disk, &file, 0, filled(1, 1)).unwrap();
        disk.set_faults(faults);
        assert_eq!(sync_file(&disk, &file).unwrap_err().raw_os_error(), Some(libc::EIO));
        disk.set_faults(Faults::default());
        sync_file(&disk, &file).unwrap();
        assert_eq!(read(&disk, &file, 0, 1).unwrap(), [1; 4096], "seed {seed}: the cache lost bytes");
        disk.restart();
        let bytes = disk.read_file("a");
        lost += bytes.iter().filter(|byte| **byte == 0).count();
        kept += bytes.iter().filter(|byte| **byte == 1).count();
        assert_eq!(
            disk.counters().lost_sectors * 512,
            bytes.iter().filter(|byte| **byte == 0).count() as u64
        );
    }
    assert!(lost > 1_000_000 && kept > 1_000_000, "{lost} bytes lost, {kept} kept");
}

#[test]
fn rewrite_after_failed_sync_becomes_durable() {
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        let file = create(&disk, "a");
        write(&disk, &file, 0, filled(1, 1)).unwrap();
        disk.set_faults(Faults { sync_error_permille: 1000, ..Faults::default() });
        sync_file(&disk, &file).unwrap_err();
        disk.set_faults(Faults::default());
        disk.allocate(&file, 0).unwrap();
        write(&disk, &file, 0, filled(1, 1)).unwrap();
        sync_file(&disk, &file).unwrap();
        disk.restart();
        assert_eq!(disk.read_file("a"), [1; 4096], "seed {seed}");
    }
}

#[test]
fn name_changes_survive_crash_in_order() {
    let mut seen = BTreeSet::new();
    for seed in 0..SEEDS {
        let disk = SimulatedDisk::new(seed);
        create(&disk, "old");
        disk.open(Path::new("x"), OpenMode::Create).unwrap();
        disk.rename(Path::new("x"), Path::new("y")).unwrap();
        disk.remove(Path::new("old")).unwrap();
        assert_eq!(names(&disk), ["y"]);
        disk.restart();
        seen.insert(names(&disk).join(" "));
    }
    let expected = ["old", "old x", "old y", "y"].map(String::from);
    assert_eq!(seen, BTreeSet::from(expected));
}

#[test]
fn synced_names_survive_crash() {
    for seed in 0..SEEDS {
        let disk = SimulatedDisk::new(seed);
        create(&disk, "a");
        disk.rename(Path::new("a"), Path::new("b")).unwrap();
        disk.create_dir(Path::new("d")).unwrap();
        disk.sync_dir(Path::new("")).unwrap();
        disk.open(Path::new("d/f"), OpenMode::Create).unwrap();
        disk.sync_dir(Path::new("d")).unwrap();
        disk.restart();
        assert_eq!(names(&disk), ["b", "d/f"], "seed {seed}");
    }
}

#[test]
fn lost_rename_restores_replaced_file() {
    let mut seen = BTreeSet::new();
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        disk.write_file("a", &[1; 4096]);
        disk.write_file("b", &[2; 4096]);
        disk.rename(Path::new("b"), Path::new("a")).unwrap();
        disk.restart();
        let bytes = disk.read_file("a");
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        assert_eq!(names(&disk).len(), if bytes[0] == 1 { 2 } else { 1 }, "seed {seed}");
        seen.insert(bytes[0]);
    }
    assert_eq!(seen, BTreeSet::from([1, 2]));
}

#[test]
fn lost_directory_name_loses_its_contents() {
    let mut seen = BTreeSet::new();
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        disk.create_dir(Path::new("d")).unwrap();
        disk.create_dir(Path::new("d/e")).unwrap();
        disk.open(Path::new("d/e/f"), OpenMode::Create).unwrap();
        disk.sync_dir(Path::new("d/e")).unwrap();
        disk.sync_dir(Path::new("d")).unwrap();
        disk.restart();
        let exists = disk.list(Path::new("d/e")).is_ok();
        assert_eq!(names(&disk).len(), usize::from(exists), "seed {seed}");
        seen.insert(exists);
    }
    assert_eq!(seen.len(), 2);
}

#[test]
fn crash_after_stops_at_exact_operation_count() {
    // 1 create, 2 sync of the directory, 3 write, 4 sync.
    let run = |disk: &SimulatedDisk| -> io::Result<()> {
        let file = disk.open(Path::new("a"), OpenMode::Create)?;
        disk.sync_dir(Path::new(""))?;
        write(disk, &file, 0, filled(1, 1))?;
        read(disk, &file, 0, 1)?;
        sync_file(disk, &file)
    };
    let disk = SimulatedDisk::new(0);
    run(&disk).unwrap();
    let all = disk.operations();
    assert_eq!(all, 4);
    for n in 0..all {
        let disk = SimulatedDisk::new(n);
        disk.crash_after(n);
        let err = run(&disk).unwrap_err();
        assert_eq!((err.kind(), err.to_string()), (io::ErrorKind::Other, "power is off".to_owned()));
        assert!(disk.is_off());
        assert_eq!(disk.operations(), n);
        assert!(disk.open(Path::new("a"), OpenMode::Read).is_err());
        assert!(disk.space().is_err() && disk.list(Path::new("")).is_err());
        disk.restart();
        assert!(!disk.is_off());
        if n < 1 {
            assert_eq!(names(&disk), [""; 0]);
        }
        if n >= 2 {
            assert_eq!(names(&disk), ["a"]);
        }
    }
    let disk = SimulatedDisk::new(0);
    disk.crash_after(all);
    run(&disk).unwrap();
    assert!(disk.is_off());
    disk.restart();
    assert_eq!(disk.read_file("a"), [1; 4096]);
}

#[test]
fn file_opened_before_restart_is_unusable() {
    let disk = SimulatedDisk::new(0);
    let file = create(&disk, "a");
    disk.restart();
    assert!(write(&disk, &file, 0, filled(1, 1)).is_err());
    assert!(read(&disk, &file, 0, 1).is_err());
    assert!(sync_file(&disk, &file).is_err());
    assert!(disk.allocate(&file, 1).is_err());
    assert_eq!(disk.files(), [("a".to_owned(), 0)]);
}

#[test]
fn removed_file_is_readable_until_closed_then_frees_space() {
    let disk = SimulatedDisk::new(0);
    disk.set_faults(Faults { capacity: Some(16384), ..Faults::default() });
    let file = create(&disk, "a");
    write(&disk, &file, 0, filled(3, 5)).unwrap();
    disk.remove(Path::new("a")).unwrap();
    assert_eq!(read(&disk, &file, 8192, 1).unwrap(), [5; 4096]);
    assert_eq!(disk.space().unwrap(), DiskSpace { total: 16384, free: 4096 });
    drop(file);
    assert_eq!(disk.space().unwrap().free, 16384);
}

#[test]
fn full_disk_rejects_allocate_and_write_without_changes() {
    let disk = SimulatedDisk::new(0);
    disk.set_faults(Faults { capacity: Some(8192), ..Faults::default() });
    let file = create(&disk, "a");
    disk.allocate(&file, 8192).unwrap();
    let other = create(&disk, "b");
    assert_eq!(disk.allocate(&other, 1).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(write(&disk, &other, 0, filled(1, 1)).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.len(&other).unwrap(), 0);
    write(&disk, &file, 4096, filled(1, 1)).unwrap();
    disk.allocate(&file, 4096).unwrap();
    write(&disk, &other, 0, filled(1, 1)).unwrap();
    assert_eq!(disk.counters().no_space, 2);
    assert_eq!(disk.space().unwrap().free, 0);
}

#[test]
fn injected_faults_match_configured_rate() {
    let faults = Faults {
        read_error_permille: 100,
        write_error_permille: 100,
        sync_error_permille: 100,
        name_error_permille: 100,
        ..Faults::default()
    };
    let disk = SimulatedDisk::new(11);
    let file = create(&disk, "a");
    write(&disk, &file, 0, filled(1, 1)).unwrap();
    disk.set_faults(faults);
    let failed = |call: &dyn Fn() -> bool| (0..2000).filter(|_| !call()).count();
    let counts = [
        failed(&|| read(&disk, &file, 0, 1).is_ok()),
        failed(&|| write(&disk, &file, 0, filled(1, 1)).is_ok()),
        failed(&|| sync_file(&disk, &file).is_ok()),
        failed(&|| disk.create_dir(Path::new("d")).is_ok()),
    ];
    assert!(counts.iter().all(|count| (140..260).contains(count)), "{counts:?}");
    assert_eq!(disk.counters().errors, counts.iter().sum::<usize>() as u64);
}

#[test]
fn torn_write_fails_and_changes_some_sectors() {
    let disk = SimulatedDisk::new(3);
    let file = create(&disk, "a");
    write(&disk, &file, 0, filled(8, 1)).unwrap();
    disk.set_faults(Faults { torn_write_permille: 1000, ..Faults::default() });
    assert_eq!(write(&disk, &file, 0, filled(8, 2)).unwrap_err().raw_os_error(), Some(libc::EIO));
    let bytes = disk.read_file("a");
    let changed = bytes.chunks(SECTOR_BYTES).filter(|sector| sector[0] == 2).count();
    assert!((1..64).contains(&changed), "{changed} sectors");
    assert_eq!(disk.counters().torn_writes, 1);
}

#[test]
fn flipped_read_differs_in_one_bit_and_file_is_unchanged() {
    let disk = SimulatedDisk::new(3);
    let file = create(&disk, "a");
    write(&disk, &file, 0, filled(1, 0)).unwrap();
    disk.set_faults(Faults { flipped_read_permille: 1000, ..Faults::default() });
    let bits: u32 = read(&disk, &file, 0, 1).unwrap().iter().map(|byte| byte.count_ones()).sum();
    assert_eq!((bits, disk.counters().flipped_reads), (1, 1));
    disk.set_faults(Faults::default());
    assert_eq!(read(&disk, &file, 0, 1).unwrap(), [0; 4096]);
    disk.flip_bit("a", 9);
    assert_eq!(disk.read_file("a")[..3], [0, 2, 0]);
}

#[test]
fn short_transfers_are_continued() {
    let disk = SimulatedDisk::new(3);
    disk.set_faults(Faults { short_permille: 1000, ..Faults::default() });
    let file = create(&disk, "a");
    let mut bytes = AlignedBuf::zeroed(16 * BLOCK_BYTES);
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = (index / 7) as u8;
    }
    let expected = bytes.to_vec();
    write(&disk, &file, 0, bytes).unwrap();
    assert_eq!(read(&disk, &file, 0, 16).unwrap(), expected);
    assert_eq!(read(&disk, &file, 4096, 16).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(disk.counters().short_transfers >= 2);
}

#[test]
fn queue_runs_ops_in_any_order() {
    let mut orders = BTreeSet::new();
    for seed in 0..200 {
        let disk = SimulatedDisk::new(seed);
        let file = create(&disk, "a");
        let ops = (0..3).map(|number: u8| {
            let buffer = Buffer::Owned(filled(1, number));
            Op { tag: 0, kind: OpKind::Write, file: file.clone(), offset: 0, buffer }
        });
        let done = run_all(&mut *disk.queue(&QueueConfig::default()), ops);
        assert!(done.iter().all(|done| done.result.is_ok()));
        orders.insert(disk.read_file("a")[0]);
    }
    assert_eq!(orders, BTreeSet::from([0, 1, 2]));
}

#[test]
fn same_seed_gives_same_outcome() {
    let outcome = |seed| {
        let disk = SimulatedDisk::new(seed);
        disk.set_faults(Faults {
            write_error_permille: 50,
            torn_write_permille: 100,
            sync_error_permille: 100,
            short_permille: 300,
            ..Faults::default()
        });
        for round in 0..20u8 {
            let Ok(file) = disk.open(Path::new(&format!("f{round}")), OpenMode::Create) else { continue };
            let _ = write(&disk, &file, 0, filled(4, round));
            let _ = sync_file(&disk, &file);
            let _ = disk.sync_dir(Path::new(""));
        }
        disk.restart();
        let files = disk.files();
        let bytes: Vec<_> = files.iter().map(|(path, _)| disk.read_file(path)).collect();
        (files, bytes, disk.counters())
    };
    assert_eq!(outcome(5), outcome(5));
    assert_ne!(outcome(5), outcome(6));
}

#[test]
fn errors_match_those_of_real_file_system() {
    let disk = SimulatedDisk::new(0);
    let file = create(&disk, "a");
    disk.create_dir(Path::new("d")).unwrap();
    let kind = |result: io::Result<()>| result.unwrap_err().kind();
    let open = |path: &str, mode| disk.open(Path::new(path), mode).map(drop);
    assert_eq!(kind(open("a", OpenMode::Create)), io::ErrorKind::AlreadyExists);
    assert_eq!(kind(open("b", OpenMode::Read)), io::ErrorKind::NotFound);
    assert_eq!(kind(open("d", OpenMode::Read)), io::ErrorKind::IsADirectory);
    assert_eq!(kind(open("x/y", OpenMode::Create)), io::ErrorKind::NotFound);
    assert_eq!(kind(open("a/y", OpenMode::Create)), io::ErrorKind::NotADirectory);
    assert_eq!(kind(disk.remove(Path::new("b"))), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.rename(Path::new("b"), Path::new("a"))), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.list(Path::new("a")).map(drop)), io::ErrorKind::NotADirectory);
    assert_eq!(kind(read(&disk, &file, 0, 1).map(drop)), io::ErrorKind::UnexpectedEof);
    disk.create_dir(Path::new("d")).unwrap();
}

#[test]
fn unlinked_files_are_freed() {
    let disk = SimulatedDisk::new(0);
    for _ in 0..1000 {
        let file = create(&disk, "a");
        write(&disk, &file, 0, filled(1, 1)).unwrap();
        disk.remove(Path::new("a")).unwrap();
        disk.sync_dir(Path::new("")).unwrap();
    }
    assert!(disk.state.lock().node_count() <= 128);
    assert_eq!(disk.files(), []);
}
