//! Decodes sound files to samples at 16 kHz, block by block, with `symphonia`. Limits the length of a recording: first
//! by what its header states, and again by what it decodes to. A panic of a decoder is an error of the recording. Does
//! not know requests.

mod container;
mod flac;
mod mp3;
mod pages;
mod resample;
mod source;
mod vorbis;
mod wav;

use std::fmt;
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

pub use self::source::Source;

use self::pages::Pages;
use self::resample::Resample;
use self::source::{Allowance, End, Metered};
use crate::model::sound::RATE;
use crate::model::{TaskError, TaskErrorKind};

/// The supported formats, as errors and documents list them.
pub const SUPPORTED: &str = "WAV, FLAC, MP3 and Ogg (Vorbis, FLAC)";

/// A file format that can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Uncompressed samples: 8, 16, 24 or 32 bits, floating point, A-law, µ-law.
    Wav,
    /// FLAC.
    Flac,
    /// MPEG audio, layer 3.
    Mp3,
    /// Vorbis or FLAC in Ogg.
    Ogg,
}

impl fmt::Display for Format {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Wav => "WAV",
            Self::Flac => "FLAC",
            Self::Mp3 => "MP3",
            Self::Ogg => "Ogg",
        })
    }
}

/// The lowest accepted sample rate, in Hz. Usual recordings have rates between this one and [`HIGHEST_RATE`].
const LOWEST_RATE: u32 = 1_000;
const HIGHEST_RATE: u32 = 192_000;
/// The maximum number of channels of a recording. FLAC and Vorbis define what each channel means for up to 8 channels.
const MAX_CHANNELS: usize = 8;

/// Samples at 16 kHz of a block, for each stream: half a second, which is decoded in a few milliseconds.
const BLOCK: usize = 8_000;
/// A block ends after this many decoded samples of all channels. At high rates or with many channels it is then shorter
/// than [`BLOCK`].
const BLOCK_SAMPLES: u64 = 1 << 18;
/// The maximum number of steps for a block, each of which reads a packet or resamples a part of one. Packets may hold no
/// samples.
const BLOCK_PACKETS: usize = 256;

/// The maximum number of bytes of an Ogg file before its first sound. They hold comments, which take many times more
/// memory in the library than in the file.
const OGG_HEADER_BYTES: u64 = 512 << 10;
/// The maximum bytes that are read for a packet. The largest is a FLAC frame: 65,535 samples of 8 channels in 32 bits.
const PACKET_BYTES: u64 = 4 << 20;
/// The maximum number of broken MP3 packets that become silence. Files that were cut out of a stream begin with some.
const MAX_BROKEN: usize = 50;
/// The number of samples that an MP3 file may be shorter than it declares: 4 packets of 1,152. Some encoders count
/// their own first packet and the padding at both ends, others do not.
const MP3_SLACK: u64 = 4 * 1_152;

/// The power of a mix, divided by the mean power of its channels, below which it counts as silent: -30 dB. Two channels
/// that are independent of each other have -3 dB.
const CANCELLED: f64 = 1e-3;

/// The limits of a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Seconds of sound, summed over the channels if they are split.
    pub seconds: f64,
    /// Samples of all channels, at the recording's own rate. Decoding them takes time, and a file of a few kilobytes
    /// can hold billions of them.
    pub samples: u64,
}

impl Limits {
    /// Allows this many seconds, and the number of samples that these have at 48 kHz in stereo.
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
    codec: AudioCodecParameters,
    decoder: Box<dyn AudioDecoder>,
    allowance: Allowance,
    track: u32,
    rate: u32,
    channels: usize,
    mode: Channels,
    limits: Limits,
    /// Samples per channel, as the header declares them, or else the last page of an Ogg file.
    declared: Option<u64>,
    /// What the file says about its end.
    end: End,
    /// The bytes of a FLAC file that belong to no packet so far. Those that are left at the end are no frames.
    flac_bytes: u64,
    /// The number that the next packet of a FLAC file should have.
    next_flac_number: Option<flac::Number>,
    /// The form of the last packet of an MP3 file.
    mp3_form: Option<mp3::Form>,
    /// Samples per channel that were decoded so far.
    frames: u64,
    /// The number of broken packets that were replaced by silence so far.
    broken_packets: usize,
    /// Whether the last block or an error was returned.
    is_over: bool,
    resample: Resample,
    /// The samples of the last packet, for each channel, or their mean.
    planes: Vec<Vec<f32>>,
    /// How many of these, for each channel, were resampled so far.
    resampled: usize,
    /// The power of all samples so far, summed: of the mix, and of the channels, of which it is the mean.
    mix_power: f64,
    channel_power: f64,
    /// The last packet's samples after the end that an MP3 or Ogg file declares. They are sound if another packet follows.
    beyond_end: Vec<Vec<f32>>,
}

impl Recording {
    /// Reads a file's header.
    ///
    /// # Errors
    /// The file is of no supported format, is broken, or declares more than the limits allow.
    pub fn open(source: impl Source, limits: Limits, mode: Channels) -> Result<Self, TaskError> {
        catching_panics(|| Self::open_source(Box::new(source), limits, mode))
    }

    fn open_source(mut source: Box<dyn Source>, limits: Limits, mode: Channels) -> Result<Self, TaskError> {
        let opened = container::open(&mut *source)?;
        let format = opened.format;
        let allowance = Allowance::default();
        // Before the first sound of other formats there is at most a packet, because `container` skips the rest.
        let header_bytes = if format == Format::Ogg { OGG_HEADER_BYTES } else { PACKET_BYTES };
        allowance.renew(header_bytes);
        let file = io::Cursor::new(opened.head).chain(source.take(opened.bytes));
        let source: Box<dyn io::Read + Send + Sync> = match format {
            Format::Ogg => Box::new(Pages::new(file)),
            _ => Box::new(file),
        };
        let metered = Metered { source, allowance: allowance.clone() };
        let reading_error = |error: Error| {
            if allowance.is_spent() {
                return refused(format!("the {format} file has no sound in its first {header_bytes} bytes"));
            }
            refused(format!("the {format} file cannot be read: {}", reason(&error)))
        };
        let reader = reader(format, MediaSourceStream::new(Box::new(metered), Default::default()));
        let reader = reader.map_err(reading_error)?;
        let as_audio_track = |track: &symphonia::core::formats::Track| {
            let codec = track.codec_params.as_ref()?.audio()?.clone();
            let ogg_frames =
                opened.ogg_end.and_then(|end| end.checked_add_signed(-track.start_ts.get().max(0)));
            let declared = track.num_frames.or(ogg_frames);
            Some((track.id, declared.filter(|frames| *frames > 0), codec))
        };
        let (track, declared, codec) = reader.tracks().iter().find_map(as_audio_track).ok_or_else(|| {
            refused(format!("the {format} file has no sound in it; supported are {SUPPORTED}"))
        })?;
        let rate = codec.sample_rate.unwrap_or(0);
        let channels = codec.channels.as_ref().map_or(0, |channels| channels.count());
        check_rate_and_channels(format, rate, channels)?;
        let streams = if mode == Channels::Split { channels } else { 1 };
        let length_check = LengthCheck { rate, channels, streams, limits };
        declared.map_or(Ok(()), |frames| length_check.check(frames, "declares"))?;
        let is_stated =
            opened.end == End::Stated || declared.is_some() && matches!(format, Format::Flac | Format::Mp3);
        if codec.codec == CODEC_ID_VORBIS {
            vorbis::check(codec.extra_data.as_deref().unwrap_or(&[])).map_err(|fault| {
                refused(format!("the {format} file's codebooks (tables in its Vorbis header) are {fault}"))
            })?;
        }
        let decoder = decoder(&codec).map_err(reading_error)?;
        let resample = Resample::new(rate, streams).map_err(resampling_error)?;
        Ok(Self {
            format,
            reader,
            codec,
            decoder,
            allowance,
            track,
            rate,
            channels,
            mode,
            limits,
            declared,
            end: if is_stated { End::Stated } else { opened.end },
            flac_bytes: opened.bytes,
            next_flac_number: None,
            mp3_form: None,
            frames: 0,
            broken_packets: 0,
            is_over: false,
            resample,
            planes: Vec::new(),
            resampled: 0,
            mix_power: 0.0,
            channel_power: 0.0,
            beyond_end: Vec::new(),
        })
    }

    /// The file's format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The number of streams in each block: 1, or the number of channels.
    pub fn streams(&self) -> usize {
        if self.mode == Channels::Split { self.channels } else { 1 }
    }

    /// The seconds that the header or the last page of an Ogg file declares, if one does. Fewer may be decoded. More
    /// are decoded, too, up to the limits.
    pub fn declared_seconds(&self) -> Option<f64> {
        self.declared.map(|frames| frames as f64 / f64::from(self.rate))
    }

    /// The seconds that were decoded so far; at the end, the length of the recording.
    pub fn seconds(&self) -> f64 {
        self.frames as f64 / f64::from(self.rate)
    }

    /// Whether nothing in the file says where its sound ends, so that a missing end cannot be noticed.
    pub fn has_unmarked_end(&self) -> bool {
        self.end == End::Unmarked
    }

    /// Whether the channels cancelled each other in the mix so far, as two channels of opposite polarity do.
    pub fn has_silent_mix(&self) -> bool {
        self.mix_power < CANCELLED * self.channel_power
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
        let block = catching_panics(|| self.decode_block());
        self.is_over |= block.is_err();
        block
    }

    fn decode_block(&mut self) -> Result<Option<Vec<Vec<f32>>>, TaskError> {
        let mut block = vec![Vec::new(); self.streams()];
        let mut frames = 0;
        for _ in 0..BLOCK_PACKETS {
            if self.resampled == self.planes.first().map_or(0, Vec::len) {
                self.allowance.renew(PACKET_BYTES);
                let Some(packet) = self.next_packet()? else {
                    self.finish(&mut block)?;
                    break;
                };
                if packet.track_id != self.track {
                    continue;
                }
                self.decode_packet(packet)?;
                self.resampled = 0;
            }
            // A packet of few samples at a low rate becomes many times as many, for each channel.
            let max_frames = (BLOCK as u64 * u64::from(self.rate) / u64::from(RATE)) as usize;
            let end = self.planes[0].len().min(self.resampled + max_frames);
            let piece = std::mem::replace(&mut self.resampled, end)..end;
            frames += piece.len() as u64;
            self.resample.push(&self.planes, piece, &mut block).map_err(resampling_error)?;
            if block[0].len() >= BLOCK || frames * self.channels as u64 >= BLOCK_SAMPLES {
                break;
            }
        }
        Ok(Some(block))
    }

    fn next_packet(&mut self) -> Result<Option<Packet>, TaskError> {
        match self.reader.next_packet() {
            Ok(packet) => Ok(packet),
            Err(Error::IoError(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                // For other formats `finish` checks the length.
                let is_cut_off = self.format == Format::Ogg && self.end != End::Unmarked;
                if is_cut_off { Err(self.cut_off_error()) } else { Ok(None) }
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
            Err(error) => Err(self.decoding_error(&error)),
        }
    }

    /// Decodes a packet into `planes`: the channels, or their mean.
    fn decode_packet(&mut self, mut packet: Packet) -> Result<(), TaskError> {
        // The library would leave out all packets after the declared end, which may be wrong: MP3 files that were joined
        // have the header of the first one, and pages of an Ogg file may state no time.
        let is_trimmed = matches!(self.format, Format::Mp3 | Format::Ogg);
        let trim = if is_trimmed { std::mem::take(&mut packet.trim_end).get() } else { 0 };
        match self.format {
            Format::Flac => self.follow_flac_numbers(&packet)?,
            Format::Mp3 => self.follow_mp3_form(&packet)?,
            Format::Wav | Format::Ogg => {}
        }
        match self.decoder.decode(&packet) {
            Ok(samples) => {
                let (rate, channels) = (samples.spec().rate(), samples.num_planes());
                let are_accepted = channels == self.channels || self.mode == Channels::Mix && channels > 0;
                if rate != self.rate || !are_accepted {
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
            Err(Error::DecodeError(_)) if self.format == Format::Mp3 && self.broken_packets < MAX_BROKEN => {
                self.broken_packets += 1;
                let frames = usize::try_from(packet.dur.get()).unwrap_or(0).min(BLOCK);
                self.planes.iter_mut().for_each(Vec::clear);
                self.planes.resize_with(self.channels, Vec::new);
                self.planes.iter_mut().for_each(|plane| plane.resize(frames, 0.0));
            }
            Err(error) => return Err(self.decoding_error(&error)),
        }
        if self.mode == Channels::Mix {
            let power = |plane: &Vec<f32>| f64::from(plane.iter().map(|x| x * x).sum::<f32>());
            self.channel_power += self.planes.iter().map(power).sum::<f64>() / self.planes.len() as f64;
            mix(&mut self.planes);
            self.mix_power += power(&self.planes[0]);
        }
        let kept =
            self.planes[0].len() - usize::try_from(trim).unwrap_or(usize::MAX).min(self.planes[0].len());
        let beyond_end = self.planes.iter_mut().map(|plane| plane.split_off(kept)).collect();
        for (plane, earlier) in
            self.planes.iter_mut().zip(std::mem::replace(&mut self.beyond_end, beyond_end))
        {
            plane.splice(..0, earlier);
        }
        self.frames += self.planes[0].len() as u64;
        self.length_check().check(self.frames, "holds at least")?;
        for sample in self.planes.iter_mut().flatten() {
            // Files with floating-point samples may hold any number.
            *sample = if sample.is_nan() { 0.0 } else { sample.clamp(-1.0, 1.0) };
        }
        Ok(())
    }

    /// Refuses a FLAC file where a frame is missing: the library skips one that it does not understand.
    fn follow_flac_numbers(&mut self, packet: &Packet) -> Result<(), TaskError> {
        self.flac_bytes = self.flac_bytes.saturating_sub(packet.data.len() as u64);
        let number = flac::Number::read(&packet.data);
        if self.next_flac_number.is_some_and(|next| number != Some(next)) {
            return Err(self.cut_off_error());
        }
        self.next_flac_number = number.map(|number| number.next(packet.dur.get()));
        Ok(())
    }

    /// Replaces the decoder where the form of an MP3 file's frames changes, as from mono to stereo in files that were
    /// joined: the library's decoder refuses frames of another form than that of its first. `decode_packet` refuses
    /// another rate.
    fn follow_mp3_form(&mut self, packet: &Packet) -> Result<(), TaskError> {
        let Some((form, _)) = mp3::frame(&packet.data) else { return Ok(()) };
        if self.mp3_form.replace(form).is_some_and(|last| last != form) {
            let decoder = MpaDecoder::try_new(&self.codec, &AudioDecoderOptions::default());
            self.decoder = Box::new(decoder.map_err(|error| self.decoding_error(&error))?);
        }
        Ok(())
    }

    /// Ends the recording: checks its length, and appends the resampled rest to `block`.
    fn finish(&mut self, block: &mut [Vec<f32>]) -> Result<(), TaskError> {
        self.is_over = true;
        let slack = match self.format {
            Format::Wav | Format::Flac => 0,
            Format::Mp3 => MP3_SLACK,
            // `next_packet` has refused a file that is cut off.
            Format::Ogg => u64::MAX,
        };
        let is_short = self.declared.is_some_and(|declared| self.frames < declared.saturating_sub(slack));
        // The library skips what it does not understand.
        let is_skipped = self.format == Format::Flac && self.flac_bytes > 0;
        if is_short || is_skipped || self.frames == 0 && self.format == Format::Mp3 {
            return Err(self.cut_off_error());
        }
        self.resample.finish(block).map_err(resampling_error)
    }

    fn length_check(&self) -> LengthCheck {
        LengthCheck { rate: self.rate, channels: self.channels, streams: self.streams(), limits: self.limits }
    }

    fn cut_off_error(&self) -> TaskError {
        let declared =
            self.declared_seconds().map(|seconds| format!(" of {seconds:.1} s")).unwrap_or_default();
        refused(format!(
            "the {} file is cut off or broken after {:.1} s{declared}",
            self.format,
            self.seconds()
        ))
    }

    fn decoding_error(&self, error: &Error) -> TaskError {
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
struct LengthCheck {
    rate: u32,
    channels: usize,
    /// The number of streams. The limit of seconds is for all of them together.
    streams: usize,
    limits: Limits,
}

impl LengthCheck {
    /// Checks a length of `frames` samples per channel. `has` is the verb of the error: the recording "declares" them,
    /// or "holds at least" them.
    fn check(&self, frames: u64, has: &str) -> Result<(), TaskError> {
        let Self { rate, channels, streams, limits } = self;
        let seconds = frames as f64 / f64::from(*rate);
        if seconds * *streams as f64 > limits.seconds {
            let max_seconds = limits.seconds;
            let (each, in_all) = match streams {
                1 => (String::new(), ""),
                _ => (format!(" in each of {streams} channels"), " in all"),
            };
            let text = format!(
                "the recording {has} {seconds:.1} s of sound{each}; at most {max_seconds} s are taken{in_all} (max_seconds)"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, text));
        }
        let samples = frames.saturating_mul(*channels as u64);
        if samples > limits.samples {
            let max_samples = limits.samples;
            let text = format!(
                "the recording {has} {samples} samples ({seconds:.1} s, {rate} Hz, {channels} channels); \
                 at most {max_samples} are taken"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, text));
        }
        Ok(())
    }
}

fn check_rate_and_channels(format: Format, rate: u32, channels: usize) -> Result<(), TaskError> {
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

/// The decoder. The codebooks of a Vorbis file must have been checked.
fn decoder(codec: &AudioCodecParameters) -> Result<Box<dyn AudioDecoder>, Error> {
    let options = AudioDecoderOptions::default();
    Ok(match codec.codec {
        CODEC_ID_FLAC => Box::new(FlacDecoder::try_new(codec, &options)?),
        CODEC_ID_MP3 => Box::new(MpaDecoder::try_new(codec, &options)?),
        CODEC_ID_VORBIS => Box::new(VorbisDecoder::try_new(codec, &options)?),
        _ => Box::new(PcmDecoder::try_new(codec, &options)?),
    })
}

/// The text of a library's error, without its prefix.
fn reason(error: &Error) -> String {
    match error {
        Error::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => "it is cut off".to_owned(),
        Error::IoError(error) if error.kind() == io::ErrorKind::InvalidData => error.to_string(),
        Error::DecodeError(reason) | Error::Unsupported(reason) => (*reason).to_owned(),
        error => error.to_string(),
    }
}

/// Runs a call of a decoder. Turns a panic into an error of the file that caused it.
fn catching_panics<T>(call: impl FnOnce() -> Result<T, TaskError>) -> Result<T, TaskError> {
    let caught = catch_unwind(AssertUnwindSafe(call));
    caught.unwrap_or_else(|_| Err(refused("the recording is broken: its decoder fails on it")))
}

fn refused(message: impl Into<String>) -> TaskError {
    TaskError::new(TaskErrorKind::BadInput, message)
}

fn unreadable(error: io::Error) -> TaskError {
    TaskError::internal(format!("the recording cannot be read: {error}"))
}

fn resampling_error(error: impl fmt::Display) -> TaskError {
    TaskError::internal(format!("resampling fails: {error}"))
}
