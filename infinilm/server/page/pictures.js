// Pictures of a question: chosen, pasted or dropped, made small enough to be sent, and shown as thumbnails.

import { iconButton, make } from "./dom.js";

// A photo of a phone has several times as many pixels as models read, and more bytes than servers take.
const LONGEST = 2048, MOST_BYTES = 2 << 20;
const SENT_AS_IT_IS = /^image\/(?:png|jpeg|webp|bmp)$/;  // an animation becomes its first frame

/** The files of a clipboard or of a drop that are pictures. */
export const picturesAmong = transfer => [...transfer?.files ?? []].filter(file => file.type.startsWith("image/"));

/** Whether a text is the address of a picture that holds all of it, as messages have them. */
export const isPicture = value => typeof value === "string" && value.startsWith("data:image/");

const loaded = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

/** A file as an address that holds it. Throws where the browser cannot decode it. */
async function addressOf(file) {
  const bitmap = await createImageBitmap(file);
  const factor = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  if (factor === 1 && file.size <= MOST_BYTES && SENT_AS_IT_IS.test(file.type)) return loaded(file);
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * factor));
  canvas.height = Math.max(1, Math.round(bitmap.height * factor));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return /png|gif|webp|svg/.test(file.type) ? canvas.toDataURL("image/png") : canvas.toDataURL("image/jpeg", 0.92);
}

function thumbnail(address, place) {
  const image = make("img");
  image.src = address;
  image.alt = `Picture ${place + 1}`;
  return image;
}

/** The pictures of a question that was sent; each is shown large, and small again, by a click. */
export function gallery(pictures) {
  const node = make("div", "pictures");
  node.append(...pictures.map((address, place) => {
    const button = make("button", "picture");
    button.type = "button";
    button.setAttribute("aria-label", `Show picture ${place + 1} large or small`);
    button.append(thumbnail(address, place));
    button.onclick = () => button.classList.toggle("large");
    return button;
  }));
  return node;
}

/** The pictures that go with the next question. */
export class Tray {
  /** `changed` hears of every change, `failed` why a file is not among them. */
  constructor(node, {changed, failed}) {
    Object.assign(this, {node, changed, failed, pictures: []});
  }

  /** Show these, a list that is the tray's own from now on. */
  show(pictures) {
    this.pictures = pictures;
    this.node.hidden = !pictures.length;
    this.node.replaceChildren(...pictures.map((address, place) => {
      const item = make("span", "picture");
      const label = `Remove picture ${place + 1}`;
      item.append(thumbnail(address, place), iconButton("close", label, () => {
        this.show(this.pictures.filter((_, index) => index !== place));
        this.changed();
      }));
      return item;
    }));
  }

  /** Add files. They belong to the question that was written when they came, whatever is shown when they are read. */
  async add(files) {
    const {pictures} = this;
    for (const file of files) {
      try { pictures.push(await addressOf(file)); }
      catch { this.failed(`“${file.name}” is no picture that this browser reads`); }
    }
    if (pictures !== this.pictures) return;
    this.show(pictures);
    this.changed();
  }
}
