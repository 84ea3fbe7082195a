//! Decodes sound files to samples at 16 kHz, block by block, with `symphonia`. Limits the length of a recording: first
//! by what its header states, and again by what it decodes to. A panic of a decoder is an error of the recording. Knows
//! no requests.

mod container;
mod pages;
mod resample;
mod source;
mod vorbis;

use std::io::{self, Read as _};
use std::panic::{AssertUnwindSafe, catch_unwind};

use symphonia::core::codecs::audio::well_known::{CODEC_ID_FLAC, CODEC_ID_MP3, CODEC_ID_VORBIS};
use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatOptions, FormatReader};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::packet::Packet;
use symphonia::default::codecs::{FlacDecoder, MpaDecoder, PcmDecoder, VorbisDecoder};
use symphonia::default::formats::{FlacReader, MpaReader, OggReader, WavReader};

pub use self::container::{Format, SUPPORTED};
pub use self::source::Source;

use self::pages::Pages;
use self::resample::Resample;
use self::source::{Allowance, Metered};
use crate::model::{TaskError, TaskErrorKind};

/// The range of accepted sample rates, in Hz. No usual recording has another.
const LOWEST_RATE: u32 = 1_000;
const HIGHEST_RATE: u32 = 192_000;
/// The most channels of a recording. FLAC and Vorbis define what each channel means for up to 8 channels.
const MAX_CHANNELS: usize = 8;

/// Samples at 16 kHz of a block, for each stream: half a second, which is decoded in a few milliseconds.
const BLOCK: usize = 8_000;
/// The most samples of all channels that are decoded for a block. At high rates or with many channels a block is
/// shorter.
const BLOCK_SAMPLES: u64 = 1 << 18;
/// The most packets that are read for a block, since packets may hold no samples.
const BLOCK_PACKETS: usize = 256;

/// The most bytes of an Ogg file before its first sound. They hold comments, which the library keeps in memory, many
/// times as large as in the file.
const OGG_HEADER_BYTES: u64 = 512 << 10;
/// The most bytes that are read for one packet. The largest is a FLAC frame: 65,535 samples of 8 channels in 32 bits.
const PACKET_BYTES: u64 = 4 << 20;
/// The most broken packets of an MP3 file that become silence. Files that were cut out of a stream begin with some.
const MAX_BROKEN: usize = 50;
/// How many samples an MP3 file may be shorter than it declares. Some encoders count their own first packet and the
/// padding at both ends, others do not.
const MP3_SLACK: u64 = 4 * 1_152;

/// The limits of a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Seconds of sound. If channels are split, those of each channel count.
    pub seconds: f64,
    /// Samples of all channels, at the recording's own rate. Decoding them takes time, and a file of a few kilobytes
    /// can hold billions.
    pub samples: u64,
}

impl Limits {
    /// Allows this many seconds, and as many samples as they have at 48 kHz in stereo.
    pub fn of_seconds(seconds: f64) -> Self {
        Self { seconds, samples: (seconds * 2.0 * 48_000.0) as u64 }
    }
}

/// How a recording's channels are decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Channels {
    /// One stream: the mean of all channels.
    #[default]
    Mix,
    /// A stream for each channel.
    Split,
}

/// A recording that is decoded as it is read.
pub struct Recording {
    format: Format,
    reader: Box<dyn FormatReader>,
    decoder: Box<dyn AudioDecoder>,
    allowance: Allowance,
    track: u32,
    rate: u32,
    channels: usize,
    mode: Channels,
    limits: Limits,
    /// Samples per channel, according to the header, or to the last page of an Ogg file if the header does not say.
    declared: Option<u64>,
    /// Samples per channel that were decoded.
    frames: u64,
    /// Broken packets that became silence so far.
    broken: usize,
    /// Whether the last block or an error was returned.
    is_over: bool,
    resample: Resample,
    /// The samples of the last packet, for each channel.
    planes: Vec<Vec<f32>>,
}

impl Recording {
    /// Reads a file's header.
    ///
    /// # Errors
    /// The file is of no supported format, is broken, or declares more than the limits allow.
    pub fn open(source: impl Source, limits: Limits, mode: Channels) -> Result<Self, TaskError> {
        guarded(|| Self::open_source(Box::new(source), limits, mode))
    }

    fn open_source(mut source: Box<dyn Source>, limits: Limits, mode: Channels) -> Result<Self, TaskError> {
        let opened = container::open(&mut *source)?;
        let format = opened.format;
        let allowance = Allowance::default();
        // Other formats have no more than a packet before their first sound, because `container` skips the rest.
        let header_bytes = if format == Format::Ogg { OGG_HEADER_BYTES } else { PACKET_BYTES };
        allowance.renew(header_bytes);
        let file = io::Cursor::new(opened.head).chain(source);
        let source: Box<dyn io::Read + Send + Sync> = match format {
            Format::Ogg => Box::new(Pages::new(file)),
            _ => Box::new(file),
        };
        let metered = Metered { source, allowance: allowance.clone() };
        let failed = |error: Error| {
            if allowance.is_spent() {
                return refused(format!("the {format} file has no sound in its first {header_bytes} bytes"));
            }
            refused(format!("the {format} file cannot be read: {}", reason(&error)))
        };
        let reader = reader(format, MediaSourceStream::new(Box::new(metered), Default::default()));
        let reader = reader.map_err(failed)?;
        let audio = |track: &symphonia::core::formats::Track| {
            let codec = track.codec_params.as_ref()?.audio()?.clone();
            let ogg_frames =
                opened.ogg_end.and_then(|end| end.checked_add_signed(-track.start_ts.get().max(0)));
            let stated = track.num_frames.filter(|_| opened.states_length).or(ogg_frames);
            Some((track.id, stated.filter(|frames| *frames > 0), codec))
        };
        let (track, declared, codec) = reader.tracks().iter().find_map(audio).ok_or_else(|| {
            refused(format!("the {format} file has no sound in it; supported are {SUPPORTED}"))
        })?;
        let rate = codec.sample_rate.unwrap_or(0);
        let channels = codec.channels.as_ref().map_or(0, |channels| channels.count());
        check_form(format, rate, channels)?;
        let streams = if mode == Channels::Split { channels } else { 1 };
        let length = Length { rate, channels, streams, limits };
        declared.map_or(Ok(()), |frames| length.check(frames, "declares"))?;
        let decoder = decoder(&codec).map_err(|error| match error {
            Unusable::Codebooks(fault) => {
                refused(format!("the {format} file's codebooks (tables in its Vorbis header) are {fault}"))
            }
            Unusable::Codec(error) => failed(error),
        })?;
        let resample = Resample::new(rate, streams);
        let resample = resample.map_err(|error| TaskError::internal(format!("resampling fails: {error}")))?;
        Ok(Self {
            format,
            reader,
            decoder,
            allowance,
            track,
            rate,
            channels,
            mode,
            limits,
            declared,
            frames: 0,
            broken: 0,
            is_over: false,
            resample,
            planes: Vec::new(),
        })
    }

    /// The file's format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Streams in each block: 1, or the number of channels.
    pub fn streams(&self) -> usize {
        if self.mode == Channels::Split { self.channels } else { 1 }
    }

    /// Seconds that the header or the last page of an Ogg file declares, if one does. Fewer may be decoded. If more are
    /// decoded, the recording is refused only above the limits.
    pub fn declared_seconds(&self) -> Option<f64> {
        self.declared.map(|frames| frames as f64 / f64::from(self.rate))
    }

    /// Seconds that were decoded so far; at the end, all of the recording.
    pub fn seconds(&self) -> f64 {
        self.frames as f64 / f64::from(self.rate)
    }

    /// Decodes the next block: samples at 16 kHz between -1 and 1, equally many for each stream. A block may be empty.
    /// None if the recording has ended.
    ///
    /// # Errors
    /// The file is broken or cut off, or has more sound than the limits allow. No block follows.
    pub fn next_block(&mut self) -> Result<Option<Vec<Vec<f32>>>, TaskError> {
        if self.is_over {
            return Ok(None);
        }
        let block = guarded(|| self.decode_block());
        self.is_over |= block.is_err();
        block
    }

    fn decode_block(&mut self) -> Result<Option<Vec<Vec<f32>>>, TaskError> {
        let mut block = vec![Vec::new(); self.streams()];
        let before = self.frames;
        for _ in 0..BLOCK_PACKETS {
            self.allowance.renew(PACKET_BYTES);
            let Some(packet) = self.next_packet()? else {
                self.finish(&mut block)?;
                break;
            };
            if packet.track_id == self.track {
                self.decode_packet(&packet)?;
                self.resample.push(&self.planes, &mut block).map_err(resampling)?;
            }
            let decoded = (self.frames - before) * self.channels as u64;
            if block[0].len() >= BLOCK || decoded >= BLOCK_SAMPLES {
                break;
            }
        }
        Ok(Some(block))
    }

    fn next_packet(&mut self) -> Result<Option<Packet>, TaskError> {
        match self.reader.next_packet() {
            Ok(packet) => Ok(packet),
            Err(Error::IoError(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                // An Ogg file marks its last page. For other formats the declared length is checked in `finish`.
                if self.format == Format::Ogg { Err(self.cut_off()) } else { Ok(None) }
            }
            Err(Error::ResetRequired) => Err(refused(format!(
                "the Ogg file is a chain of several recordings, the second from {:.1} s on; only one is supported",
                self.seconds()
            ))),
            Err(_) if self.allowance.is_spent() => Err(refused(format!(
                "the {} file has {PACKET_BYTES} bytes without sound at {:.1} s",
                self.format,
                self.seconds()
            ))),
            Err(error) => Err(self.broken(&error)),
        }
    }

    /// Decodes a packet into `planes`: the channels, or their mean.
    fn decode_packet(&mut self, packet: &Packet) -> Result<(), TaskError> {
        match self.decoder.decode(packet) {
            Ok(samples) => {
                let (rate, channels) = (samples.spec().rate(), samples.num_planes());
                let is_same = channels == self.channels || self.mode == Channels::Mix && channels > 0;
                if rate != self.rate || !is_same {
                    return Err(refused(format!(
                        "the {} file changes from {} Hz and {} channels to {rate} Hz and {channels} at {:.1} s",
                        self.format,
                        self.rate,
                        self.channels,
                        self.seconds()
                    )));
                }
                samples.copy_to_vecs_planar::<f32>(&mut self.planes);
            }
            Err(Error::DecodeError(_)) if self.format == Format::Mp3 && self.broken < MAX_BROKEN => {
                self.broken += 1;
                let frames = usize::try_from(packet.dur.get()).unwrap_or(0).min(BLOCK);
                self.planes.iter_mut().for_each(Vec::clear);
                self.planes.resize_with(self.channels, Vec::new);
                self.planes.iter_mut().for_each(|plane| plane.resize(frames, 0.0));
            }
            Err(error) => return Err(self.broken(&error)),
        }
        self.frames += self.planes[0].len() as u64;
        self.length().check(self.frames, "holds")?;
        if self.mode == Channels::Mix {
            mix(&mut self.planes);
        }
        for sample in self.planes.iter_mut().flatten() {
            // Files with floating-point samples may hold any number.
            *sample = if sample.is_nan() { 0.0 } else { sample.clamp(-1.0, 1.0) };
        }
        Ok(())
    }

    fn finish(&mut self, block: &mut [Vec<f32>]) -> Result<(), TaskError> {
        self.is_over = true;
        let slack = match self.format {
            Format::Wav | Format::Flac => 0,
            Format::Mp3 => MP3_SLACK,
            // The marked last page was found, so the file is complete.
            Format::Ogg => u64::MAX,
        };
        if self.declared.is_some_and(|declared| self.frames < declared.saturating_sub(slack)) {
            return Err(self.cut_off());
        }
        self.resample.finish(block).map_err(resampling)
    }

    fn length(&self) -> Length {
        Length { rate: self.rate, channels: self.channels, streams: self.streams(), limits: self.limits }
    }

    fn cut_off(&self) -> TaskError {
        let declared =
            self.declared_seconds().map(|seconds| format!(" of {seconds:.1} s")).unwrap_or_default();
        refused(format!(
            "the {} file is cut off or broken after {:.1} s{declared}",
            self.format,
            self.seconds()
        ))
    }

    fn broken(&self, error: &Error) -> TaskError {
        let (format, seconds) = (self.format, self.seconds());
        refused(format!("the {format} file cannot be decoded at {seconds:.1} s: {}", reason(error)))
    }
}

/// Replaces the planes with one, the mean of all.
fn mix(planes: &mut Vec<Vec<f32>>) {
    let channels = planes.len();
    let Some((mean, others)) = planes.split_first_mut() else { return };
    if channels > 1 {
        for other in others {
            mean.iter_mut().zip(other).for_each(|(mean, other)| *mean += *other);
        }
        mean.iter_mut().for_each(|mean| *mean /= channels as f32);
    }
    planes.truncate(1);
}

/// Checks a recording's length against the limits.
struct Length {
    rate: u32,
    channels: usize,
    /// Each counts towards the seconds.
    streams: usize,
    limits: Limits,
}

impl Length {
    /// Checks `frames` samples per channel. `verb` says where they are from: the file `declares` or `holds` them.
    fn check(&self, frames: u64, verb: &str) -> Result<(), TaskError> {
        let Self { rate, channels, streams, limits } = self;
        let seconds = frames as f64 / f64::from(*rate);
        let least = if verb == "declares" { "" } else { "at least " };
        if seconds * *streams as f64 > limits.seconds {
            let most = limits.seconds;
            let (each, in_all) = match streams {
                1 => (String::new(), ""),
                _ => (format!(" in each of {streams} channels"), " in all"),
            };
            let text = format!(
                "the recording {verb} {least}{seconds:.1} s of sound{each}; at most {most} s are taken{in_all}"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, text));
        }
        let samples = frames.saturating_mul(*channels as u64);
        if samples > limits.samples {
            let most = limits.samples;
            let text = format!(
                "the recording {verb} {least}{samples} samples ({seconds:.1} s, {rate} Hz, {channels} channels); \
                 at most {most} are taken"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, text));
        }
        Ok(())
    }
}

fn check_form(format: Format, rate: u32, channels: usize) -> Result<(), TaskError> {
    if !(LOWEST_RATE..=HIGHEST_RATE).contains(&rate) {
        return Err(refused(format!(
            "the {format} file has a sample rate of {rate} Hz; rates from {LOWEST_RATE} to {HIGHEST_RATE} Hz are taken"
        )));
    }
    if !(1..=MAX_CHANNELS).contains(&channels) {
        return Err(refused(format!(
            "the {format} file has {channels} channels; from 1 to {MAX_CHANNELS} channels are taken"
        )));
    }
    Ok(())
}

fn reader(format: Format, stream: MediaSourceStream<'static>) -> Result<Box<dyn FormatReader>, Error> {
    let options = FormatOptions::default();
    Ok(match format {
        Format::Wav => Box::new(WavReader::try_new(stream, options)?),
        Format::Flac => Box::new(FlacReader::try_new(stream, options)?),
        Format::Mp3 => Box::new(MpaReader::try_new(stream, options)?),
        Format::Ogg => Box::new(OggReader::try_new(stream, options)?),
    })
}

/// Why there is no decoder.
enum Unusable {
    Codebooks(vorbis::Fault),
    Codec(Error),
}

fn decoder(codec: &AudioCodecParameters) -> Result<Box<dyn AudioDecoder>, Unusable> {
    let options = AudioDecoderOptions::default();
    let made: Result<Box<dyn AudioDecoder>, Error> = match codec.codec {
        CODEC_ID_FLAC => FlacDecoder::try_new(codec, &options).map(|it| Box::new(it) as _),
        CODEC_ID_MP3 => MpaDecoder::try_new(codec, &options).map(|it| Box::new(it) as _),
        CODEC_ID_VORBIS => {
            vorbis::check(codec.extra_data.as_deref().unwrap_or(&[])).map_err(Unusable::Codebooks)?;
            VorbisDecoder::try_new(codec, &options).map(|it| Box::new(it) as _)
        }
        _ => PcmDecoder::try_new(codec, &options).map(|it| Box::new(it) as _),
    };
    made.map_err(Unusable::Codec)
}

/// A library's error without its own prefix.
fn reason(error: &Error) -> String {
    match error {
        Error::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => "it is cut off".to_owned(),
        Error::IoError(error) if error.kind() == io::ErrorKind::InvalidData => error.to_string(),
        Error::DecodeError(reason) | Error::Unsupported(reason) => (*reason).to_owned(),
        error => error.to_string(),
    }
}

/// Runs a call of a decoder. A panic is a fault of the file that caused it.
fn guarded<T>(call: impl FnOnce() -> Result<T, TaskError>) -> Result<T, TaskError> {
    let caught = catch_unwind(AssertUnwindSafe(call));
    caught.unwrap_or_else(|_| Err(refused("the recording is broken: its decoder fails on it")))
}

fn refused(message: impl Into<String>) -> TaskError {
    TaskError::new(TaskErrorKind::BadInput, message)
}

fn unreadable(error: io::Error) -> TaskError {
    TaskError::internal(format!("the recording cannot be read: {error}"))
}

fn resampling(error: rubato::ResampleError) -> TaskError {
    TaskError::internal(format!("resampling fails: {error}"))
}
