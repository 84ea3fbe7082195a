//! Sound through the public interface: files of every format, hostile ones, Whisper's features, held
//! against what other programs make of the same recording (`scripts/make-sound-fixtures.py`).

use std::io::Cursor;
use std::path::Path;

use safetensors::SafeTensors;
use sconce::model::sound::RATE;
use sconce::model::sound::decode::{Channels, Format, Limits, Recording};
use sconce::model::sound::features::{FRAMES, LogMel, WINDOW};
use sconce::protocol::{TaskError, TaskErrorKind};

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/sound").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn limits() -> Limits {
    Limits::of_seconds(3_600.0)
}

fn open(bytes: impl Into<Vec<u8>>, channels: Channels) -> Result<Recording, TaskError> {
    Recording::open(Cursor::new(bytes.into()), limits(), channels)
}

/// All samples of each stream.
fn decoded(mut recording: Recording) -> Result<Vec<Vec<f32>>, TaskError> {
    let mut streams = vec![Vec::new(); recording.streams()];
    while let Some(block) = recording.next_block()? {
        streams.iter_mut().zip(block).for_each(|(stream, block)| stream.extend(block));
    }
    Ok(streams)
}

fn mono(bytes: impl Into<Vec<u8>>) -> Result<Vec<f32>, TaskError> {
    Ok(decoded(open(bytes, Channels::Mix)?)?.remove(0))
}

fn refusal(bytes: impl Into<Vec<u8>>) -> (TaskErrorKind, String) {
    let error = mono(bytes).expect_err("it is refused");
    (error.kind, error.message)
}

/// A WAV file of 16-bit samples, interleaved.
fn wav(rate: u32, channels: u16, samples: &[i16]) -> Vec<u8> {
    let mut file = wav_header(rate, channels, 2 * samples.len() as u32);
    samples.iter().for_each(|sample| file.extend(sample.to_le_bytes()));
    file
}

fn wav_header(rate: u32, channels: u16, data: u32) -> Vec<u8> {
    let riff = if data == u32::MAX { data } else { data.saturating_add(36) };
    let mut file = b"RIFF".to_vec();
    file.extend(riff.to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0");
    file.extend(channels.to_le_bytes());
    file.extend(rate.to_le_bytes());
    file.extend((rate * u32::from(channels) * 2).to_le_bytes());
    file.extend((channels * 2).to_le_bytes());
    file.extend(b"\x10\0data");
    file.extend(data.to_le_bytes());
    file
}

fn tone(rate: u32, hertz: f64, seconds: f64) -> impl Iterator<Item = i16> {
    let step = std::f64::consts::TAU * hertz / f64::from(rate);
    (0..(f64::from(rate) * seconds) as usize).map(move |at| (16_000.0 * (step * at as f64).sin()) as i16)
}

/// By how much `found` differs from `expected`, in dB of its power.
fn noise(found: &[f32], expected: &[f32]) -> f64 {
    let power = |samples: &mut dyn Iterator<Item = f32>| samples.map(|it| f64::from(it * it)).sum::<f64>();
    let noise = power(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    10.0 * (noise / power(&mut expected.iter().copied())).log10()
}

#[test]
fn every_format_gives_the_same_sound_at_the_same_time() {
    let flac = mono(fixture("short.flac")).unwrap();
    assert_eq!(flac.len(), 84_800);
    let samples: Vec<i16> = flac.iter().map(|sample| (sample * 32_768.0) as i16).collect();
    assert_eq!(mono(wav(RATE, 1, &samples)).unwrap(), flac);
    for (name, format, most) in [("short.mp3", Format::Mp3, -18.0), ("short.ogg", Format::Ogg, -18.0)] {
        let recording = open(fixture(name), Channels::Split).unwrap();
        assert_eq!((recording.format(), recording.streams()), (format, 2), "{name}");
        let streams = decoded(recording).unwrap();
        for (stream, loudness) in streams.iter().zip([1.0, 0.5]) {
            assert!(stream.len().abs_diff(flac.len()) < 10, "{name}: {} samples", stream.len());
            let expected: Vec<f32> = flac.iter().map(|sample| sample * loudness).collect();
            let noise = noise(stream, &expected);
            assert!(noise < most, "{name}: {noise} dB");
        }
        // The mean of all channels.
        let mixed = mono(fixture(name)).unwrap();
        let mean = streams[0].iter().zip(&streams[1]).map(|(a, b)| (a + b) / 2.0).collect::<Vec<_>>();
        assert!(noise(&mixed, &mean) < -80.0, "{name}");
    }
}

#[test]
fn wav_files_of_every_rate_and_channel_count_are_decoded() {
    for (rate, channels) in [(8_000, 1), (11_025, 2), (44_100, 2), (48_000, 6), (96_000, 1), (192_000, 8)] {
        let tones: Vec<Vec<i16>> = (0..channels)
            .map(|channel| tone(rate, 200.0 + 100.0 * f64::from(channel), 0.4).collect())
            .collect();
        let samples: Vec<i16> =
            (0..tones[0].len()).flat_map(|at| tones.iter().map(move |it| it[at])).collect();
        let streams = decoded(open(wav(rate, channels, &samples), Channels::Split).unwrap()).unwrap();
        assert_eq!(streams.len(), usize::from(channels), "{rate} Hz");
        for (channel, stream) in streams.iter().enumerate() {
            let expected: Vec<f32> = tone(RATE, 200.0 + 100.0 * channel as f64, 0.4)
                .map(|sample| f32::from(sample) / 32_768.0)
                .collect();
            assert_eq!(stream.len(), expected.len(), "{rate} Hz");
            let noise = noise(&stream[800..5_600], &expected[800..5_600]);
            assert!(noise < -50.0, "{rate} Hz, channel {channel}: {noise} dB");
        }
    }
}

#[test]
fn a_wav_file_from_a_pipe_states_no_length_and_is_decoded() {
    for unknown in [u32::MAX, 0x7fff_f000] {
        let mut file = wav_header(RATE, 1, unknown);
        tone(RATE, 440.0, 1.0).for_each(|sample| file.extend(sample.to_le_bytes()));
        assert_eq!(mono(file).unwrap().len(), 16_000, "{unknown}");
    }
}

/// A chunk `fmt ` of samples at 16 kHz, with these bytes at its end.
fn form(tag: u16, channels: u16, bits: u16, align: u16, extension: &[u8]) -> Vec<u8> {
    let mut chunk = [tag, channels].map(u16::to_le_bytes).concat();
    chunk.extend(RATE.to_le_bytes());
    chunk.extend((RATE * u32::from(align)).to_le_bytes());
    chunk.extend([align, bits].map(u16::to_le_bytes).concat());
    [chunk, extension.to_vec()].concat()
}

/// The end of an extensible chunk: its length, the number of valid bits, no places of channels, and the encoding.
fn extension(tag: u16, valid_bits: u16) -> Vec<u8> {
    let numbers = [22, valid_bits, 0, 0, tag].map(u16::to_le_bytes).concat();
    [&numbers[..], b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"].concat()
}

/// A WAV file whose header states the size of the file and of its samples.
fn wav_of(form: &[u8], samples: &[u8]) -> Vec<u8> {
    let mut file = b"RIFF\0\0\0\0WAVEfmt ".to_vec();
    file.extend((form.len() as u32).to_le_bytes());
    file.extend(form);
    file.extend(b"data");
    file.extend((samples.len() as u32).to_le_bytes());
    file.extend(samples);
    let riff = file.len() as u32 - 8;
    file[4..8].copy_from_slice(&riff.to_le_bytes());
    file
}

#[test]
fn a_wav_file_whose_sizes_are_wrong_is_read_to_its_end() {
    let expected = mono(fixture("short.flac")).unwrap();
    let samples: Vec<i16> = expected.iter().map(|sample| (sample * 32_768.0) as i16).collect();
    let good = wav(RATE, 1, &samples);
    let data = good.len() as u32 - 44;
    let sized = |riff: u32, data: u32| {
        let mut file = good.clone();
        file[4..8].copy_from_slice(&riff.to_le_bytes());
        file[40..44].copy_from_slice(&data.to_le_bytes());
        file
    };
    let is_unmarked = |file: &[u8]| open(file, Channels::Mix).unwrap().has_unmarked_end();
    for riff in [0, 3, data, data + 28, data + 36, u32::MAX] {
        let file = sized(riff, data);
        assert!(!is_unmarked(&file), "{riff}");
        assert_eq!(mono(file).unwrap(), expected, "{riff}");
        for stated in [0, u32::MAX] {
            let file = sized(riff, stated);
            assert!(is_unmarked(&file), "{riff}, {stated}");
            assert_eq!(mono(file).unwrap(), expected, "{riff}, {stated}");
        }
    }
    // A tenth of a second of 16,000 samples of two bytes may be missing.
    assert_eq!(mono(sized(data + 36, data + 3_200)).unwrap(), expected);
    assert!(refusal(sized(data + 36, data + 3_202)).1.contains("bytes follow"));
    // Half a sample at the end is none.
    assert_eq!(mono([&sized(0, 0)[..], &[1]].concat()).unwrap(), expected);
    assert!(mono(wav(RATE, 1, &[])).unwrap().is_empty());
}

#[test]
fn wav_files_describe_the_same_samples_in_several_ways() {
    let values: Vec<i16> = tone(RATE, 440.0, 0.5).collect();
    let expected: Vec<f32> = values.iter().map(|value| f32::from(*value) / 32_768.0).collect();
    let whole = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    // 24 bits at the top of 32, and 12 at the top of 16.
    let wide = values.iter().flat_map(|value| (i32::from(*value) << 16).to_le_bytes()).collect::<Vec<u8>>();
    let float = expected.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let double = expected.iter().flat_map(|value| f64::from(*value).to_le_bytes()).collect::<Vec<u8>>();
    let zeros = [0; 24];
    for (form, samples) in [
        (form(1, 1, 16, 2, &[]), &whole),
        (form(1, 1, 16, 2, &[0, 0]), &whole),
        (form(1, 1, 16, 2, &[2, 0, 16, 0]), &whole),
        (form(1, 1, 16, 0, &[]), &whole),
        (form(1, 1, 12, 2, &[]), &whole),
        (form(1, 1, 16, 4, &[]), &whole),
        (form(1, 1, 16, 1, &[]), &whole),
        (form(1, 1, 24, 4, &[]), &wide),
        (form(0xfffe, 1, 16, 2, &extension(1, 16)), &whole),
        (form(0xfffe, 1, 32, 4, &extension(1, 24)), &wide),
        (form(3, 1, 32, 4, &[]), &float),
        (form(3, 1, 32, 4, &[0, 0]), &float),
        (form(3, 1, 32, 4, &[2, 0, 32, 0]), &float),
        (form(3, 1, 32, 4, &zeros), &float),
        (form(3, 1, 64, 8, &[]), &double),
        (form(0xfffe, 1, 32, 4, &extension(3, 0)), &float),
        (form(0xfffe, 1, 32, 4, &extension(3, 32)), &float),
    ] {
        let plain = wav_of(&form, samples);
        assert_eq!(mono(plain.clone()).unwrap(), expected, "{form:?}");
        let fact = 12 + 8 + form.len();
        let with_fact = [&plain[..fact], b"fact\x0c\0\0\0", &[7; 12], &plain[fact..]].concat();
        assert_eq!(mono(with_fact).unwrap(), expected, "{form:?}");
    }
    // The codes of 8 values by G.711.
    let laws: [(u16, [u8; 8], [i16; 8]); 2] = [
        (
            7,
            [0xff, 0x7f, 0x80, 0x00, 0xf0, 0x70, 0xaa, 0x2a],
            [0, 0, 32_124, -32_124, 120, -120, 5_372, -5_372],
        ),
        (
            6,
            [0xd5, 0x55, 0xaa, 0x2a, 0xc5, 0x45, 0x80, 0x00],
            [8, -8, 32_256, -32_256, 264, -264, 5_504, -5_504],
        ),
    ];
    for (tag, codes, values) in laws {
        let expected = values.map(|value| f32::from(value) / 32_768.0);
        for (form, what) in [
            (form(tag, 1, 8, 1, &[]), 16),
            (form(tag, 1, 8, 1, &[0, 0]), 18),
            (form(tag, 1, 8, 1, &[2, 0, 8, 0]), 20),
            (form(0xfffe, 1, 8, 1, &extension(tag, 8)), 40),
        ] {
            assert_eq!(mono(wav_of(&form, &codes)).unwrap(), expected, "{tag}, {what} bytes");
        }
    }
}

#[test]
fn one_packet_of_a_minute_is_given_out_in_blocks_of_half_a_second() {
    // 484 bytes: 65.5 s in each of 8 channels.
    let file = constant_flac(1_000, 4, 8);
    for (mode, streams) in [(Channels::Split, 8), (Channels::Mix, 1)] {
        let mut recording = open(file.clone(), mode).unwrap();
        let mut samples = 0;
        while let Some(block) = recording.next_block().unwrap() {
            assert!(block.len() == streams && block[0].len() < 17_000, "{} samples", block[0].len());
            samples += block[0].len();
        }
        assert_eq!(samples, 4 * 65_535 * 16);
    }
}

#[test]
fn joined_mp3_files_are_decoded_beyond_the_end_that_the_first_one_declares() {
    let file = fixture("short.mp3");
    let alone = mono(file.clone()).unwrap();
    let joined = mono([&file[..], &file[..]].concat()).unwrap();
    // The second file's own header is a packet of silence, and its decoder's delay is not taken off.
    assert!(joined.len() > 2 * alone.len() && joined.len() < 2 * alone.len() + 4_000, "{}", joined.len());
    assert!(noise(&joined[..alone.len() - 2_000], &alone[..alone.len() - 2_000]) < -60.0);
}

#[test]
fn an_mp3_file_that_was_cut_out_of_a_stream_is_decoded() {
    let found = mono(fixture("cut.mp3")).unwrap();
    assert!(found.len() > 80_000, "{}", found.len());
    let power = |samples: &[f32]| samples.iter().map(|it| it * it).sum::<f32>() / samples.len() as f32;
    assert!(power(&found[16_000..]) > 1e-4);
}

#[test]
fn an_mp3_file_may_begin_with_something_else_and_end_with_tags() {
    let file = fixture("short.mp3");
    let expected = mono(file.clone()).unwrap();
    let tag = b"ID3\x03\0\0\0\0\0\x0aTALB\0\0\0\0\0\0";
    let after_tag = 10 + file[9] as usize + ((file[8] as usize) << 7);
    let sound = &file[after_tag..];
    let trails: [&[u8]; 4] = [
        &[b"TAG", &[0xff; 125][..]].concat(),
        &[
            b"APETAGEX",
            &[0xd0, 7, 0, 0, 64, 0, 0, 0][..],
            &[0; 16],
            &[0xff; 32],
            b"APETAGEX\xd0\x07\0\0\x40\0\0\0\0\0\0\0\0\0\0\x80\0\0\0\0\0\0\0\0",
        ]
        .concat(),
        &[&[0xff; 100][..], b"000100LYRICS200"].concat(),
        &[b"TAG+", &[0xff; 223][..], b"TAG", &[b' '; 125]].concat(),
    ];
    let ape_header = b"APETAGEX\xd0\x07\0\0\x40\x9c\0\0\0\0\0\0\0\0\0\xa0\0\0\0\0\0\0\0\0";
    let ape_tag = [&ape_header[..], &[0xff; 40_000]].concat();
    for before in [
        &b""[..],
        &tag[..],
        &[&tag[..], b"    "].concat(),
        &[0; 417],
        &[0; 100_000],
        &sound[900..1_100],
        &ape_tag,
    ] {
        for after in trails {
            let found = mono([before, sound, after].concat()).unwrap();
            assert_eq!(found, expected, "{} bytes before, {} after", before.len(), after.len());
        }
    }
    assert!(mono(vec![0; 2_000_000]).is_err());
    let free = [0xff, 0xfb, 0x00, 0x40, 0, 0, 0, 0];
    assert!(refusal(free).1.contains("MP3 with a free bit rate"));
}

#[test]
fn an_mp3_file_may_change_between_mono_and_stereo() {
    let [one, two] = ["short-mono.mp3", "short.mp3"].map(fixture);
    let (first, second) = (mono(one.clone()).unwrap(), mono(two.clone()).unwrap());
    let joined = mono([&one[..], &two[..]].concat()).unwrap();
    // The second file's delay is not taken off.
    assert!(joined.len().abs_diff(first.len() + second.len()) < 4_000, "{}", joined.len());
    assert!(noise(&joined[..first.len()], &first) < -60.0);
    let offset = (first.len()..first.len() + 2_000)
        .min_by_key(|at| (noise(&joined[*at..at + 40_000], &second[..40_000]) * 1e3) as i64)
        .unwrap();
    let noise = noise(&joined[offset..offset + 80_000], &second[..80_000]);
    assert!(noise < -20.0, "{noise} dB at {offset}");
    let error = decoded(open([&one[..], &two[..]].concat(), Channels::Split).unwrap()).unwrap_err();
    assert!(error.message.contains("and 1 channels to 44100 Hz and 2 at 5."), "{}", error.message);
}

#[test]
fn a_file_that_does_not_say_where_it_ends_is_decoded_and_says_so() {
    let is_unmarked = |file: Vec<u8>| open(file, Channels::Mix).unwrap().has_unmarked_end();
    for name in ["short.flac", "short.mp3", "short.ogg"] {
        assert!(!is_unmarked(fixture(name)), "{name}");
    }
    assert!(is_unmarked(fixture("short-mono.mp3")));
    // FLAC without the number of samples, in 36 bits.
    let mut flac = fixture("short.flac");
    flac[21] &= 0xf0;
    flac[22..26].fill(0);
    assert!(is_unmarked(flac.clone()));
    assert_eq!(mono(flac.clone()).unwrap(), mono(fixture("short.flac")).unwrap());
    // Cut within a frame.
    for missing in [1, 100] {
        let error = refusal(&flac[..flac.len() - missing]).1;
        assert!(error.starts_with("the FLAC file is cut off or broken after 5."), "{error}");
    }

    let ogg = fixture("short.ogg");
    let expected = mono(ogg.clone()).unwrap();
    let starts: Vec<usize> = (0..ogg.len() - 4).filter(|at| &ogg[*at..at + 4] == b"OggS").collect();
    let last = *starts.last().unwrap();
    let unmarked = [&ogg[..last], &without_last_flag(&ogg[last..])].concat();
    assert!(is_unmarked(unmarked.clone()));
    let found = mono(unmarked.clone()).unwrap();
    assert!(found.len().abs_diff(expected.len()) < 1_000, "{}", found.len());
    assert!(noise(&found[..80_000], &expected[..80_000]) < -80.0);
    // A last page that holds nothing and is marked, which some programs write.
    let next = (u32::from_le_bytes(ogg[last + 18..last + 22].try_into().unwrap()) + 1).to_le_bytes();
    let end = [&b"OggS\0\x04"[..], &ogg[last + 6..last + 18], &next, &[0; 4], b"\x01\0"].concat();
    let marked = [&unmarked[..], &with_checksum(end)].concat();
    assert!(!is_unmarked(marked.clone()));
    assert!(mono(marked).unwrap().len().abs_diff(expected.len()) < 1_000);
    // Within a page.
    assert!(
        refusal(&unmarked[..unmarked.len() - 1]).1.starts_with("the Ogg file is cut off or broken after")
    );
}

/// The pages of an Ogg file.
fn pages(file: &[u8]) -> Vec<Vec<u8>> {
    let mut starts: Vec<usize> = (0..file.len() - 4).filter(|at| &file[*at..at + 4] == b"OggS").collect();
    starts.push(file.len());
    starts.windows(2).map(|pair| file[pair[0]..pair[1]].to_vec()).collect()
}

/// A page with its checksum corrected.
fn with_checksum(mut page: Vec<u8>) -> Vec<u8> {
    page[22..26].fill(0);
    let sum = crc32(&page);
    page[22..26].copy_from_slice(&sum.to_le_bytes());
    page
}

#[test]
fn an_ogg_file_without_a_page_is_refused_and_one_without_times_is_heard() {
    let file = fixture("short.ogg");
    let expected = mono(file.clone()).unwrap();
    let pages = pages(&file);
    assert!(pages.len() > 6, "{} pages", pages.len());
    for missing in 3..pages.len() - 1 {
        let kept = pages.iter().enumerate().filter(|(index, _)| *index != missing);
        let error = refusal(kept.flat_map(|(_, page)| page.clone()).collect::<Vec<u8>>()).1;
        assert!(error.ends_with("a page is missing"), "{missing}: {error}");
    }
    let without_times = |from: usize, to: usize| {
        let page = |(index, page): (usize, &Vec<u8>)| {
            let mut page = page.clone();
            if (from..to).contains(&index) {
                page[6..14].fill(0xff);
            }
            with_checksum(page)
        };
        mono(pages.iter().enumerate().flat_map(page).collect::<Vec<u8>>()).unwrap()
    };
    for (from, to) in [(3, 4), (3, pages.len() - 1)] {
        let found = without_times(from, to);
        assert!(found.len().abs_diff(expected.len()) < 1_000, "{from}..{to}: {} samples", found.len());
        assert!(noise(&found[..40_000], &expected[..40_000]) < -60.0, "{from}..{to}");
    }
}

#[test]
fn the_end_of_another_stream_is_not_the_end_of_an_ogg_file() {
    let file = fixture("short.ogg");
    let pages = pages(&file);
    let mut other = b"OggS\0\x06\0\0\0\0\0\0\0\0\x63\0\0\0\0\0\0\0\0\0\0\0\x01\x08fishead\0".to_vec();
    other = with_checksum(other);
    let mut joined = [&pages[0][..], &other, &pages[1..].concat()].concat();
    let last = joined.len() - 2_000;
    joined[last] ^= 1;
    let error = refusal(joined).1;
    assert!(error.contains("cut off or broken after 5.") || error.contains("checksum"), "{error}");
}

/// A page of an Ogg file that is not the last.
fn without_last_flag(page: &[u8]) -> Vec<u8> {
    let mut page = page.to_vec();
    page[5] &= !4;
    with_checksum(page)
}

#[test]
fn flac_headers_of_old_encoders_are_read() {
    let file = fixture("short.flac");
    let expected = mono(file.clone()).unwrap();
    let largest = [file[10], file[11]];
    for least in [[0, 0], [0, 16], largest] {
        for states_length in [true, false] {
            let mut changed = file.clone();
            changed[8..10].copy_from_slice(&least);
            if !states_length {
                changed[21] &= 0xf0;
                changed[22..26].fill(0);
            }
            assert_eq!(mono(changed).unwrap(), expected, "{least:?}");
        }
    }
    let tagged = [&file[..], b"TAG", &[0; 125]].concat();
    assert_eq!(mono(tagged).unwrap(), expected);
}

#[test]
fn a_flac_frame_that_is_not_understood_is_named_by_its_second() {
    for states_length in [true, false] {
        let mut file = fixture("short.flac");
        if !states_length {
            file[21] &= 0xf0;
            file[22..26].fill(0);
        }
        let half = file.len() / 2;
        file[half..half + 4].fill(0);
        let (kind, message) = refusal(file);
        assert_eq!(kind, TaskErrorKind::BadInput);
        assert!(message.starts_with("the FLAC file is cut off or broken after 2."), "{message}");
    }
}

#[test]
fn channels_that_cancel_each_other_are_noticed() {
    let left: Vec<i16> = tone(RATE, 440.0, 1.0).collect();
    let with_right = |right: fn(i16) -> i16| {
        let samples: Vec<i16> = left.iter().flat_map(|sample| [*sample, right(*sample)]).collect();
        let mut recording = open(wav(RATE, 2, &samples), Channels::Mix).unwrap();
        while recording.next_block().unwrap().is_some() {}
        recording.has_silent_mix()
    };
    assert!(with_right(|left| -left));
    assert!(with_right(|left| 1 - left));
    assert!(!with_right(|left| left));
    assert!(!with_right(|_| 0));
    assert!(!with_right(|left| -left / 2));
}

#[test]
fn what_is_no_sound_is_refused_by_name_with_what_is_supported() {
    let opus = fixture("short.opus");
    let mut tagged = b"ID3\x04\0\0\0\0\x01\x00".to_vec();
    tagged.extend([0; 128]);
    tagged.extend(b"\0\0\0\x20ftypM4A ");
    let cases: [(&[u8], &str); 8] = [
        (&opus, "Opus"),
        (b"\0\0\0\x20ftypM4A ", "MP4"),
        (&tagged, "MP4"),
        (b"\x1a\x45\xdf\xa3....", "WebM"),
        (b"\xff\xf1\x50\x80....", "AAC"),
        (b"\xff\xfd\x90\x04....", "layer 2"),
        (b"{\"file_url\":1}", "JSON"),
        (b"hello, this is a text", "21 bytes are of no known sound format"),
    ];
    for (bytes, named) in cases {
        let (kind, message) = refusal(bytes);
        assert_eq!(kind, TaskErrorKind::BadInput);
        assert!(message.contains(named), "{message}");
        assert!(message.contains("WAV, FLAC, MP3 and Ogg (Vorbis, FLAC)"), "{message}");
    }
    assert_eq!(refusal(b"").1, "the recording is empty");
}

#[test]
fn headers_that_lie_and_forms_out_of_range_are_refused_with_their_values() {
    let mut short = wav_header(RATE, 1, 1_000_000);
    short.resize(short.len() + 4_000, 0);
    let cases = [
        (short, "the WAV header declares 1000000 bytes of sound, and 4000 bytes follow"),
        (wav(0, 1, &[0; 8]), "a sample rate of 0 Hz; rates from 1000 to 192000 Hz are taken"),
        (wav(384_000, 1, &[0; 8]), "a sample rate of 384000 Hz"),
        (wav(RATE, 9, &[0; 18]), "has 9 channels; from 1 to 8 channels are taken"),
        (wav(RATE, 0, &[0; 8]), "has 0 channels; from 1 to 8 channels are taken"),
        (wav_of(&form(2, 1, 4, 256, &[]), &[0; 512]), "holds Microsoft ADPCM (format 2)"),
        (wav_of(&form(0xfffe, 1, 16, 2, &extension(0x55, 16)), &[0; 8]), "holds MP3 (format 85)"),
        (wav_of(&form(3, 1, 16, 2, &[]), &[0; 8]), "states samples of 16 bits"),
        (b"RIFF\x24\0\0\0WAVEdata\x04\0\0\0\0\0\0\0".to_vec(), "no fmt chunk before its sound"),
        (b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0".to_vec(), "fmt chunk is too short: 0 bytes"),
        (wav(RATE, 1, &[])[..36].to_vec(), "no chunk named data"),
        (b"fLaC".to_vec(), "it is cut off"),
        (b"OggS".to_vec(), "cut off"),
    ];
    for (file, expected) in cases {
        let (kind, message) = refusal(file);
        assert_eq!(kind, TaskErrorKind::BadInput, "{message}");
        assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
    }
}

#[test]
fn truncated_files_are_refused_with_how_far_they_go() {
    for (name, expected) in [
        ("short.flac", "the FLAC file is cut off or broken after 2."),
        ("short.ogg", "the Ogg file is cut off or broken after 2."),
        ("short.mp3", "the MP3 file is cut off or broken after 2."),
    ] {
        let file = fixture(name);
        let (kind, message) = refusal(&file[..file.len() / 2]);
        assert_eq!(kind, TaskErrorKind::BadInput);
        assert!(message.starts_with(expected), "{message}");
        // An MP3 file may lack its last packets: encoders count them in several ways.
        for length in (0..file.len() * 19 / 20).step_by(file.len() / 40) {
            assert!(mono(&file[..length]).is_err(), "{name} of {length} bytes");
        }
    }
    let file = fixture("short.flac");
    assert!(refusal(&file[..file.len() - 100]).1.contains(" of 5.3 s"));
}

#[test]
fn declared_lengths_over_the_limits_are_refused_before_decoding() {
    let ten_hours = wav_header(RATE, 1, 36_000 * 32_000 - 100);
    let limits = Limits::of_seconds(7_200.0);
    let open =
        |bytes: Vec<u8>| Recording::open(Cursor::new(bytes), limits, Channels::Mix).map(drop).unwrap_err();
    // The bytes that the header declares are there, but not in memory.
    let size = 44 + 36_000 * 32_000;
    let source = Sparse { head: ten_hours, at: 0, size };
    let error = Recording::open(source, limits, Channels::Mix).map(drop).unwrap_err();
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert_eq!(
        error.message,
        "the recording declares 36000.0 s of sound; at most 7200 s are taken (max_seconds)"
    );
    // An hour of eight channels at 192 kHz is as much to decode as 32 hours of stereo at 48 kHz.
    let source = Sparse { head: wav_header(192_000, 8, 1_400_000_000), at: 0, size: 1_400_000_044 };
    let limits = Limits::of_seconds(600.0);
    let error = Recording::open(source, limits, Channels::Mix).map(drop).unwrap_err();
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert_eq!(
        error.message,
        "the recording declares 700000000 samples (455.7 s, 192000 Hz, 8 channels); at most 57600000 are taken"
    );
    // FLAC: 36 bits of the header count samples.
    let mut flac = fixture("short.flac");
    flac[21] |= 0x0f;
    let error = open(flac);
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert!(error.message.contains("declares 4026537.1 s of sound; at most 7200 s"), "{}", error.message);
}

/// A file that is zeros behind its beginning.
struct Sparse {
    head: Vec<u8>,
    at: u64,
    size: u64,
}

impl std::io::Read for Sparse {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = buffer.len().min((self.size - self.at.min(self.size)) as usize);
        for (at, byte) in (self.at..).zip(&mut buffer[..count]) {
            *byte = self.head.get(at as usize).copied().unwrap_or(0);
        }
        self.at += count as u64;
        Ok(count)
    }
}

impl std::io::Seek for Sparse {
    fn seek(&mut self, to: std::io::SeekFrom) -> std::io::Result<u64> {
        self.at = match to {
            std::io::SeekFrom::Start(at) => at,
            std::io::SeekFrom::End(back) => self.size.saturating_add_signed(back),
            std::io::SeekFrom::Current(by) => self.at.saturating_add_signed(by),
        };
        Ok(self.at)
    }
}

/// A FLAC file of so many frames of silence: each is 16 bytes or so, and decodes to 65,535 samples.
fn constant_flac(rate: u32, frames: u32, channels: u8) -> Vec<u8> {
    let mut file = b"fLaC\x80\0\0\x22".to_vec();
    file.extend(65_535u16.to_be_bytes());
    file.extend(65_535u16.to_be_bytes());
    file.extend([0; 6]);
    // 20 bits of the rate, 3 of the channels, 5 of the bits in a sample; no length is declared.
    let form = u64::from(rate) << 44 | u64::from(channels - 1) << 41 | 15 << 36;
    file.extend(form.to_be_bytes());
    file.extend([0; 16]);
    for number in 0..frames {
        // The block's length is in 16 bits behind the number; the rate is the header's; 16 bits in a sample.
        let mut frame = vec![0xff, 0xf8, 0x70, (channels - 1) << 4 | 0x08];
        let mut coded = [0; 4];
        frame.extend(char::from_u32(number).expect("no surrogate").encode_utf8(&mut coded).bytes());
        frame.extend(65_534u16.to_be_bytes());
        frame.push(crc(&frame, 8, 0x07) as u8);
        (0..channels).for_each(|_| frame.extend([0, 0, 0]));
        frame.extend((crc(&frame, 16, 0x8005) as u16).to_be_bytes());
        file.extend(frame);
    }
    file
}

fn crc(bytes: &[u8], width: u32, polynomial: u32) -> u32 {
    let top = 1 << (width - 1);
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte) << (width - 8), |crc, _| {
            (crc << 1 ^ if crc & top != 0 { polynomial } else { 0 }) & ((top << 1) - 1)
        })
    })
}

#[test]
fn a_flac_file_of_silence_that_decodes_to_weeks_is_refused_at_the_bound() {
    let file = constant_flac(RATE, 40_000, 1);
    assert!(file.len() < 700_000, "{} bytes for {} days", file.len(), 40_000 * 65_535 / RATE / 86_400);
    let mut recording = Recording::open(Cursor::new(file), Limits::of_seconds(600.0), Channels::Mix).unwrap();
    assert_eq!(recording.declared_seconds(), None);
    let (mut longest, mut samples) = (0, 0);
    let error = loop {
        match recording.next_block() {
            Ok(block) => {
                let block = block.expect("an error comes first");
                longest = longest.max(block[0].len());
                samples += block[0].len();
            }
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert_eq!(
        error.message,
        "the recording holds at least 602.1 s of sound; at most 600 s are taken (max_seconds)"
    );
    assert!(longest < 16_100 && samples < 600 * 16_000, "{longest}, {samples}");
    assert!(recording.next_block().unwrap().is_none());
    // A file of 8 channels costs as much time in an eighth of the seconds.
    let limits = Limits { seconds: 600.0, samples: 600 * 16_000 };
    for (channels, words) in [
        (Channels::Mix, "8 channels); at most 9600000 are taken"),
        // The seconds of each channel count.
        (Channels::Split, "s of sound in each of 8 channels; at most 600 s are taken in all (max_seconds)"),
    ] {
        let eight = Recording::open(Cursor::new(constant_flac(RATE, 400, 8)), limits, channels).unwrap();
        let error = decoded(eight).unwrap_err();
        assert!(error.message.contains(words), "{}", error.message);
    }
}

#[test]
fn what_a_flac_or_wav_header_holds_beside_its_form_is_skipped_unread() {
    let plain = fixture("short.flac");
    let mut flac = plain[..42].to_vec();
    flac[4] = 0;
    // A seek table of seven bytes, which the library refuses, and a picture.
    flac.extend(b"\x03\0\0\x07seekers\x06\x10\0\0");
    flac.extend(vec![7; 1 << 20]);
    flac.extend(&plain[4..]);
    let second = 42 + 11 + 4 + (1 << 20);
    // The second STREAMINFO is skipped, too, with what follows it.
    assert_eq!(flac[second] & 0x7f, 0);
    assert_eq!(mono(flac.clone()).unwrap(), mono(plain).unwrap());
    let blocks = [&flac[..42], &b"\x01\0\0\0".repeat(200)[..]].concat();
    assert_eq!(refusal(blocks).1, "the FLAC file has more than 128 metadata blocks");
    assert_eq!(
        refusal(&b"fLaC\x01\0\0\0"[..]).1,
        "the FLAC file cannot be read: it does not begin with a STREAMINFO block"
    );

    let file = wav(16_000, 1, &[1_000; 800]);
    let texts = b"LIST\x0b\0\0\0INFOILLXXXX\0";
    let with_texts = [&file[..12], texts, &file[12..36], texts, &file[36..]].concat();
    assert_eq!(mono(with_texts).unwrap(), mono(file.clone()).unwrap());
    let huge = [&file[..12], b"fmt \x01\x04\0\0", &[0; 1_026], &file[36..]].concat();
    assert_eq!(refusal(huge).1, "the WAV file has 1025 bytes in its fmt chunk; at most 1024 are taken");
}

#[test]
fn an_ogg_file_with_false_pages_is_refused_and_what_follows_is_ignored() {
    let file = fixture("short.ogg");
    let expected = mono(file.clone()).unwrap();
    assert_eq!(mono([&file[..], &[0; 1_000]].concat()).unwrap(), expected);
    let pages: Vec<usize> = (0..file.len() - 4).filter(|at| &file[*at..at + 4] == b"OggS").collect();
    let third = pages[3];
    let between = [&file[..third], b"OggS", &file[third..]].concat();
    assert!(refusal(between).1.ends_with("a page has a wrong checksum"));
    let between = [&file[..third], b"noise", &file[third..]].concat();
    assert!(refusal(between).1.ends_with("there are bytes between its pages"));
    let mut changed = file.clone();
    changed[third + 100] ^= 1;
    assert!(refusal(changed).1.ends_with("a page has a wrong checksum"));
}

#[test]
fn floating_point_samples_that_are_no_sound_become_sound() {
    let mut file = wav_header(RATE, 1, 4 * 8);
    file[20] = 3;
    file[32] = 4;
    file[34] = 32;
    let values = [0.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -2.0, -0.25, 1e-40];
    values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    assert_eq!(mono(file).unwrap(), [0.5, 0.0, 1.0, -1.0, 1.0, -1.0, -0.25, 1e-40]);
}

/// An Ogg file whose Vorbis header asks for 256 codebooks of a million numbers each, in 7 KB.
#[test]
fn a_vorbis_header_that_asks_for_gigabytes_is_refused() {
    let mut bits = Bits::default();
    bits.push(255, 8);
    for _ in 0..256 {
        bits.push(0x56_4342, 24);
        bits.push(8, 16);
        bits.push(131_072, 24);
        // Ordered by length: all entries have 17 bits.
        bits.push(1, 1);
        bits.push(16, 5);
        bits.push(131_072, 18);
        bits.push(1, 4);
        bits.push(0, 64);
        bits.push(0, 4);
        bits.push(0, 1);
        // Four values: the eighth power of 4 is less than the number of entries, that of 5 is more.
        bits.push(0, 4);
    }
    let setup = [b"\x05vorbis".to_vec(), bits.bytes].concat();
    let mut identification = b"\x01vorbis\0\0\0\0\x01".to_vec();
    identification.extend(44_100u32.to_le_bytes());
    identification.extend([0; 12]);
    identification.extend([0xb8, 1]);
    let comment = b"\x03vorbis\0\0\0\0\0\0\0\0\x01".to_vec();
    let file = ogg(&[&[&identification], &[&comment, &setup], &[&vec![0; 8]]]);
    assert!(file.len() < 10_000, "{} bytes", file.len());
    let (kind, message) = refusal(file);
    assert_eq!(kind, TaskErrorKind::BadInput);
    assert!(message.contains("codebooks") && message.contains("too large: more than"), "{message}");
}

#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    count: usize,
}

impl Bits {
    fn push(&mut self, value: u64, bits: u32) {
        for bit in 0..bits {
            if self.count.is_multiple_of(8) {
                self.bytes.push(0);
            }
            let last = self.bytes.last_mut().expect("a byte was pushed");
            *last |= ((value >> bit & 1) as u8) << (self.count % 8);
            self.count += 1;
        }
    }
}

/// Pages, each of whole packets.
fn ogg(pages: &[&[&Vec<u8>]]) -> Vec<u8> {
    let mut file = Vec::new();
    for (number, packets) in pages.iter().enumerate() {
        let mut segments = Vec::new();
        for packet in *packets {
            segments.extend(std::iter::repeat_n(255, packet.len() / 255));
            segments.push((packet.len() % 255) as u8);
        }
        let kind = if number == 0 { 2 } else { 0 };
        let mut page = b"OggS\0".to_vec();
        page.push(kind);
        page.extend([0; 8]);
        page.extend(7u32.to_le_bytes());
        page.extend((number as u32).to_le_bytes());
        page.extend([0; 4]);
        page.push(segments.len() as u8);
        page.extend(segments);
        packets.iter().for_each(|packet| page.extend(*packet));
        let sum = crc32(&page);
        page[22..26].copy_from_slice(&sum.to_le_bytes());
        file.extend(page);
    }
    file
}

fn crc32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte) << 24, |crc: u32, _| {
            crc << 1 ^ if crc >> 31 != 0 { 0x04c1_1db7 } else { 0 }
        })
    })
}

/// Files with a few bytes changed or cut end in sound or an error: nothing else comes out of a decoder.
#[test]
fn files_with_changed_bytes_end_in_sound_or_an_error() {
    let mut state = 35u32;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    for name in ["short.flac", "short.mp3", "short.ogg"] {
        let file = fixture(name);
        for round in 0..60 {
            let mut bytes = file.clone();
            // Half of the changes are in the header.
            let within = if round % 2 == 0 { bytes.len() } else { 6_000 };
            for _ in 0..1 + draw(20) {
                bytes[draw(within)] = draw(256) as u8;
            }
            bytes.truncate(draw(bytes.len()) + 1);
            if let Ok(samples) = mono(bytes) {
                assert!(samples.iter().all(|sample| sample.abs() <= 2.0), "{name}, round {round}");
            }
        }
    }
}

fn numbers(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = tensors.tensor(name).expect("a tensor").data().to_vec();
    data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes"))).collect()
}

#[test]
fn features_are_those_of_transformers() {
    let data = fixture("features.safetensors");
    let tensors = SafeTensors::deserialize(&data).unwrap();
    let frames: Vec<usize> =
        numbers(&tensors, "frames").iter().map(|frame| frame.to_bits() as usize).collect();
    let reading = mono(fixture("reading.flac")).unwrap();
    let whole: Vec<f32> = reading.iter().copied().cycle().take(WINDOW).collect();
    for mels in [80, 128] {
        let features = LogMel::new(mels);
        for (name, samples) in [("mels", &reading), ("whole", &whole)] {
            let found = features.features(samples);
            assert_eq!(found.len(), mels * FRAMES);
            let expected = numbers(&tensors, &format!("{name}{mels}"));
            let mut worst = 0.0f32;
            for (mel, expected) in expected.chunks_exact(frames.len()).enumerate() {
                for (frame, expected) in frames.iter().zip(expected) {
                    worst = worst.max((found[mel * FRAMES + frame] - expected).abs());
                }
            }
            assert!(worst < 1e-4, "{name}{mels}: {worst}");
        }
    }
}

#[test]
fn features_of_silence_and_of_nothing_are_numbers() {
    for samples in [vec![], vec![0.0; 1], vec![0.0; WINDOW], vec![1.0; WINDOW + 1]] {
        let found = LogMel::new(80).features(&samples);
        assert_eq!(found.len(), 80 * FRAMES);
        assert!(found.iter().all(|value| value.is_finite()), "{} samples", samples.len());
    }
}
